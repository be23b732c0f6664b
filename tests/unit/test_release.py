"""What keeps a tree from being released is named, and nothing else."""

import subprocess
from pathlib import Path

import pytest

from tools.release import ROOT, problems, version_of


def _git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(("git", *identity, *arguments), cwd=root, check=True, capture_output=True)


def _tree(root: Path, version: str = "1.2.0", heading: str = "1.2.0, 2026-12-01") -> Path:
    (root / "megatron_dppo").mkdir()
    (root / "megatron_dppo/__init__.py").write_text(f'__version__ = "{version}"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n- Fixed: it.\n\n## 1.1.0, 2026-11-01\n")
    _git(root, "init")
    _git(root, "add", ".")
    _git(root, "commit", "-m", "first")
    return root


def places(root: Path) -> list[str]:
    """Return the files of the problems, or "git"."""
    return [each.partition(":")[0] for each in problems(root)]


def test_a_tree_that_is_ready_has_no_problem(tmp_path: Path) -> None:
    assert places(_tree(tmp_path)) == []


@pytest.mark.parametrize(
    ("version", "heading", "place"),
    [
        ("1.2.0.dev0", "1.2.0.dev0, 2026-12-01", "megatron_dppo/__init__.py"),
        ("1.2.0", "Unreleased", "CHANGELOG.md"),
        ("1.2.0", "1.2.0", "CHANGELOG.md"),
        ("1.3.0", "1.2.0, 2026-12-01", "CHANGELOG.md"),
    ],
)
def test_a_version_that_means_nothing_is_refused(
    tmp_path: Path, version: str, heading: str, place: str
) -> None:
    assert places(_tree(tmp_path, version, heading)) == [place]


def test_a_changed_file_and_a_tag_are_named(tmp_path: Path) -> None:
    root = _tree(tmp_path)
    _git(root, "tag", "v1.2.0")
    (root / "new.txt").write_text("")
    assert places(root) == ["git", "git"]


def test_changes_of_a_version_in_development_are_under_unreleased() -> None:
    """A released version is the one of the first heading."""
    first = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()[0]
    assert (first == "Unreleased") == version_of(ROOT).endswith(".dev0")
