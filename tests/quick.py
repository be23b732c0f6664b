"""Runs lint and the tests of what changed: `make quick`. tests/README.md has the table of these tests.

python tests/quick.py                 # changes since the branch left main, uncommitted and new files too
python tests/quick.py --since HEAD~3
python tests/quick.py --show          # only prints the commands
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "tests" / "README.md"
BIN = Path(sys.executable).parent
SMOKE = "tests/unit/test_algorithms_vectors.py"  # if no row of the table applies
LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("python", "tests/lint/size_limits.py"),
)


def main() -> int:
    """Lint, check the types of changed files, and run their tests. Return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="default: where the branch left main")
    parser.add_argument("--show", action="store_true", help="print the commands and run none")
    options = parser.parse_args()
    started = time.perf_counter()
    changed = changed_files(options.since or _git("merge-base", "HEAD", "main"))
    tests = tests_of(changed, table(README.read_text("utf-8")))
    python = [name for name in changed if name.endswith(".py")]
    # pyright uses one core. The tests start after the linters, so that two cores are busy.
    first = [("pyright", *python)] if python else []
    second = [*LINT, ("python", "-m", "pytest", "-q", "-x", *tests)]
    if options.show:
        print("\n".join(shlex.join(command) for command in [*second, *first]))
        return 0
    print(f"{len(changed)} changed files; tests: {' '.join(tests)}", flush=True)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(_run_all, (first, second)))
    print(f"{'passed' if all(outcomes) else 'FAILED'} in {time.perf_counter() - started:.0f} s")
    return 0 if all(outcomes) else 1


def changed_files(since: str, root: Path = ROOT) -> list[str]:
    """Return the files that exist and differ from a commit, new ones included, relative to the root."""
    names = {
        *_git("diff", "--name-only", "--diff-filter=d", since, root=root).splitlines(),
        *_git("ls-files", "--others", "--exclude-standard", root=root).splitlines(),
    }
    return sorted(names)


def table(text: str) -> dict[str, list[str]]:
    """Return the test files of each path in the README's table "Changed, run"."""
    rows = re.findall(r"^\| `([\w./]+)` \| ((?:`tests/unit/[\w/.]+`,? ?)+) \|", text, re.MULTILINE)
    return {path: re.findall(r"`([^`]+)`", tests) for path, tests in rows}


def tests_of(changed: Iterable[str], rows: Mapping[str, list[str]]) -> list[str]:
    """Return the changed test files, and the tests of the row with the longest path for each other file."""
    found: dict[str, None] = {}
    for name in changed:
        if re.fullmatch(r"tests/unit/test_\w+\.py", name):
            found[name] = None
        elif paths := [path for path in rows if name == path or name.startswith(f"{path.rstrip('/')}/")]:
            found |= dict.fromkeys(rows[max(paths, key=len)])
    return list(found) or [SMOKE]


def _run_all(commands: Iterable[tuple[str, ...]]) -> bool:
    """Run commands in turn until one fails; print the output of each as it ends."""
    for command in commands:
        result = subprocess.run(
            [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        failed = result.returncode != 0
        output = (result.stdout + result.stderr).strip()
        print(f"{'FAILED' if failed else 'passed'}: {shlex.join(command[:3])}", flush=True)
        if failed or "pytest" in command:
            print(output if failed else output.splitlines()[-1], flush=True)
        if failed:
            return False
    return True


def _git(*arguments: str, root: Path = ROOT) -> str:
    command = ("git", *arguments)
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
