"""Check that the version can be released, and build its wheel: `make release`."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version_of(root: Path) -> str:
    """Return the version in `megatron_dppo/__init__.py`, from which setup.py reads it."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "megatron_dppo/__init__.py").read_text(), re.MULTILINE)
    assert found, "megatron_dppo/__init__.py names the version"
    return found[1]


def problems(root: Path) -> Iterator[str]:
    """Yield what keeps the tree from being released: found, expected, what to do."""
    version = version_of(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"megatron_dppo/__init__.py: found version {version}; expected X.Y.Z. Remove the suffix."
    heading = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    first = heading[1] if heading else "nothing"
    if not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", first):
        yield (
            f"CHANGELOG.md: found {first!r} as the first heading; expected '{version}, YYYY-MM-DD'. "
            "Rename the heading of the unreleased changes."
        )
    if changed := _git(root, "status", "--porcelain"):
        yield f"git: found {len(changed.splitlines())} changed files; expected none. Commit them."
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"git: found the tag v{version}; expected none. Raise the version."


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Build dist/, import the package from the wheel, and print the next commands."""
    if found := list(problems(ROOT)):
        print("\n".join(found), file=sys.stderr)
        return 1
    pip = (sys.executable, "-m", "pip", "--quiet")
    subprocess.run((*pip, "wheel", "--no-deps", "--wheel-dir", "dist", "."), cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob(f"megatron_dppo-{version_of(ROOT)}-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((*pip, "install", "--no-deps", "--target", folder, str(wheel)), check=True)
        code = "import megatron_dppo as m; print(m.__file__, m.__version__)"
        subprocess.run((sys.executable, "-c", code), cwd=folder, check=True)
    print(f"{wheel.relative_to(ROOT)} is built. Tag it: git tag v{version_of(ROOT)} && git push --tags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
