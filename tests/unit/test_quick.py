"""`make quick` selects the tests that run what changed, by the map from functions to tests."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import coverage_map, quick
from tests.coverage_map import CoverageMap
from tests.support.measured import FOLDER

ROOT = Path(__file__).resolve().parents[2]
MODULE = """import math

LIMIT = 3


def first(x: int) -> int:
    \"\"\"Return one.\"\"\"
    return 1


class Box:
    size: int = 2

    @property
    def second(self) -> int:
        return 2
"""
FILE = "megatron_dppo/metrics/box.py"
FIRST, SECOND = f"{FILE}::first", f"{FILE}::Box.second"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with one module of two functions."""
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ({8}, [FIRST]),
        ({6, 7}, [FIRST]),
        ({15, 16}, [SECOND]),
        ({8, 16}, [FIRST, SECOND]),
        ({3}, [FILE]),  # a constant
        ({12}, [FILE]),  # a field
        ({4, 9}, []),  # blank lines
    ],
)
def test_changed_lines_belong_to_functions_or_to_the_file(root: Path, lines: set[int], keys: list[str]) -> None:
    assert quick.keys_of(FILE, frozenset(lines), root) == keys


def runs_of(runs: Mapping[str, list[str]], seconds: float = 1.0) -> CoverageMap:
    return CoverageMap({test: seconds for tests in runs.values() for test in tests}, {}, dict(runs))


def test_a_changed_function_gets_its_tests_and_a_line_outside_those_of_the_file(root: Path) -> None:
    runs = runs_of({FIRST: ["a::1", "a::2"], SECOND: ["b::1"], "megatron_dppo/metrics/other.py::f": ["c::1"]})
    assert quick.tests_of({FILE: frozenset({8})}, runs, root) == ["a::1", "a::2"]
    assert quick.tests_of({FILE: frozenset({16})}, runs, root) == ["b::1"]
    assert quick.tests_of({FILE: frozenset({3})}, runs, root) == ["a::1", "b::1", "a::2"]


def test_unmapped_function_runs_the_tests_of_the_file_or_folder(root: Path) -> None:
    changed = {FILE: frozenset({8})}
    assert quick.tests_of(changed, runs_of({SECOND: ["b::1"]}), root) == ["b::1"]
    assert quick.tests_of(changed, runs_of({"megatron_dppo/metrics/other.py::f": ["c::1"]}), root) == ["c::1"]
    assert quick.tests_of(changed, runs_of({"megatron_dppo/rollout/x.py::f": ["d::1"]}), root) == [quick.SMOKE]


def test_each_changed_function_gets_tests_if_there_is_no_time_for_all(root: Path) -> None:
    runs = runs_of({FIRST: [f"a::{n}" for n in range(9)], SECOND: ["b::1"]}, seconds=quick.SECONDS / 2)
    chosen = quick.tests_of({FILE: frozenset({8, 16})}, runs, root)
    assert chosen[:2] == ["a::0", "b::1"] and len(chosen) == 4  # on two cores


def test_change_between_engine_and_loss_always_runs_their_comparison(root: Path) -> None:
    for name in ("megatron_dppo/engines/base.py", "megatron_dppo/run/state.py", "megatron_dppo/types.py"):
        assert quick.tests_of({name: frozenset({1})}, CoverageMap(), root)[0] == quick.ENGINE_TO_BATCH
    assert quick.ENGINE_TO_BATCH not in quick.tests_of({FILE: frozenset({1})}, CoverageMap(), root)


def test_a_changed_test_runs_alone_unless_the_file_has_changed_too(root: Path) -> None:
    name = "tests/unit/test_box.py"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("X = 1\n\n\ndef test_a():\n    assert X\n\n\ndef test_b():\n    assert X\n")
    assert quick.tests_of({name: frozenset({5})}, CoverageMap(), root) == [f"{name}::test_a"]
    assert quick.tests_of({name: frozenset({1, 5})}, CoverageMap(), root) == [name]


def test_pages_and_settings_run_the_tests_that_read_them(root: Path) -> None:
    runs = runs_of({"README.md": ["a::1"], FIRST: ["b::1"]})
    assert quick.tests_of({"README.md": frozenset({3})}, runs, root) == ["a::1"]


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(("git", *identity, *arguments), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with three files, on a branch that left main."""
    git(tmp_path, "init", "--initial-branch", "main")
    for name in ("kept.py", "edited.py", "removed.py"):
        (tmp_path / name).write_text("x = 1\ny = 2\nz = 3\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "a")
    git(tmp_path, "switch", "--create", "branch")
    return tmp_path


def test_committed_changed_and_new_lines_are_found(repository: Path) -> None:
    (repository / "committed.py").write_text("x = 2\n")
    git(repository, "add", ".")
    git(repository, "commit", "--message", "b")
    (repository / "edited.py").write_text("x = 1\ny = 4\nz = 3\n")
    (repository / "kept.py").write_text("x = 1\nz = 3\n")
    (repository / "removed.py").unlink()
    (repository / "new.py").write_text("x = 4\ny = 5\n")
    found = {name: sorted(lines) for name, lines in quick.changed_lines("main", repository).items()}
    assert found == {"committed.py": [1], "edited.py": [2], "kept.py": [1], "new.py": [1, 2, 3]}


def test_the_types_of_callers_are_checked_if_a_declaration_changes(repository: Path) -> None:
    (repository / "edited.py").write_text(MODULE)
    (repository / "caller.py").write_text("from edited import first\n\nfirst(1)\n")
    (repository / "user.py").write_text("def use(box: object) -> None:\n    print(box.second)\n")
    git(repository, "add", ".")
    git(repository, "commit", "--message", "b")
    assert quick.files_to_check({"edited.py": frozenset({8})}, repository) == ["edited.py"], "a body"
    assert quick.files_to_check({"edited.py": frozenset({6})}, repository) == ["edited.py", "caller.py"]
    assert quick.files_to_check({"edited.py": frozenset({15})}, repository) == ["edited.py", "user.py"]
    assert quick.declared(repository / "edited.py", frozenset({3, 11, 12})) == {"LIMIT", "Box", "size"}


def test_chosen_tests_run_and_all_cases_if_a_case_is_gone(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_x(n): ...\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_y(n): ...\ndef test_z(): ...\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    chosen = json.dumps(["test_a.py::test_x[2]", "test_a.py::test_y[gone]"])
    environment = os.environ | {quick.CHOSEN: chosen, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "tests.quick", "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    passed = [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert passed == ["test_a.py::test_x[2]", "test_a.py::test_y[1]", "test_a.py::test_y[2]"]


def test_cheap_and_narrow_tests_come_first_until_each_line_is_run_several_times() -> None:
    """`slow` alone runs the second line."""
    lines = {
        "wide": {"f": {1}, **{f"g{n}": {1} for n in range(50)}},
        "narrow": {"f": {1}},
        "slow": {"f": {1, 2}},
    }
    ranked = coverage_map._ranked(lines, {"wide": 0.1, "narrow": 0.1, "slow": 9.0})
    assert ranked["f"] == ["narrow", "slow", "wide"]


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    seconds = {"a::1": 0.25, "a::2": 1.5, "b::1": 3.0}
    made = CoverageMap(seconds, {"a": 1.8, "b": 3.0}, {FIRST: ["a::2", "b::1"]})
    made.write(tmp_path / "map.json")
    read = CoverageMap.read(tmp_path / "map.json")
    assert read.runs == made.runs and read.files == made.files
    assert read.seconds == {"a::2": 1.5, "b::1": 3.0}


def test_coverage_map_records_functions_and_files_of_a_test(tmp_path: Path) -> None:
    environment = os.environ | {FOLDER: str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.coverage_map", "-p", "no:cacheprovider"]
    test = "tests/unit/test_collect.py::test_the_list_of_metrics_says_what_each_count_of_the_engine_means"
    subprocess.run([*command, test], cwd=ROOT, env=environment, check=True, capture_output=True)
    made = CoverageMap().with_measured(tmp_path)
    assert made.runs["megatron_dppo/engines/base.py::EngineCounts.metrics"] == [test]
    assert made.runs["docs/reference/metrics.md"] == [test]
    assert "megatron_dppo/engines/base.py::EngineCounts.__add__" not in made.runs
    assert made.seconds[test] == pytest.approx(made.files["tests/unit/test_collect.py"])


def test_the_map_knows_every_package_and_only_tests_that_exist() -> None:
    known = CoverageMap.read()
    packages = {path.parent.name for path in (ROOT / "megatron_dppo").glob("*/__init__.py")}
    files = [key.partition("::")[0] for key in known.runs if key.startswith("megatron_dppo/")]
    assert packages <= {Path(file).parts[1] for file in files}
    assert [file for file in known.files if not (ROOT / file).exists()] == []
