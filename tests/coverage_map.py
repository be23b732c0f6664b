"""Records which functions and files each test runs or reads, in `coverage_map.json`: `make coverage-map`.

`make quick` selects tests by it. A line of the map is a function with the tests to try first: they run few
other functions and take little time, and together they run each of its lines several times.

python -m tests.coverage_map                                # all suites of the map, in about an hour
python -m tests.coverage_map tests/unit/test_collect.py     # these files again; the rest stays
"""

import argparse
import ast
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from coverage.numbits import numbits_to_nums

from tests.support.measured import FOLDER, SOURCES, start_coverage

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "coverage_map.json"
SUITES = ("tests/unit", "tests/distributed", "tests/faults", "tests/recipes")
MOST_TESTS, RUNS_OF_A_LINE = 12, 3  # of a function
_SLOW_S = 30.0  # tests that take longer are not in the map
# Python 3.11 never gets out of an exception that a watcher sets in a thread whose lines are traced. And where a
# test lets no file grow, coverage cannot write what it measured.
_NOT_MEASURED = (
    "tests/unit/test_math_reward.py::test_any_thread_may_ask",
    "tests/unit/test_math_reward.py::test_a_time_limit_holds_in_every_thread",
    "tests/faults/test_faults.py::test_a_run_survives[disk full, while a row is written, 1]",
)


# What is recorded while tests run. -----------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Measure, if `MEASURED_TESTS` is set."""
    if FOLDER in os.environ and (hasattr(config, "workerinput") or not config.option.numprocesses):
        config.pluginmanager.register(_Measurement(os.environ[FOLDER], config.rootpath))


class _Measurement:
    """Notes for each test the lines that this process runs, the files that it opens, and the seconds."""

    def __init__(self, folder: str, root: Path) -> None:
        self._folder, self._root, self._test = folder, str(root) + os.sep, ""
        self._files = defaultdict[str, set[str]](set)
        self._seconds = dict[str, tuple[float, float, list[str]]]()
        self._coverage = start_coverage(folder)
        sys.addaudithook(self._note_file)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._test, self._ready, started = item.nodeid, perf_counter(), perf_counter()
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            seconds = self._ready - started, perf_counter() - self._ready
            self._seconds[item.nodeid] = (*seconds, _shared_fixtures(item))
            self._coverage.switch_context("")
            self._test = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self._ready = perf_counter()
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        files = {test: sorted(names) for test, names in self._files.items()}
        found = {"files": files, "seconds": self._seconds}
        Path(self._folder, f"tests_{os.getpid()}.json").write_text(json.dumps(found))

    def _note_file(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self._test and isinstance(arguments[0], str | os.PathLike):
            name = os.fspath(arguments[0])
            if isinstance(name, str) and name.startswith(self._root) and name[len(self._root)] != ".":
                self._files[self._test].add(name.removeprefix(self._root))


def _shared_fixtures(item: Any) -> list[str]:
    """Return the names of the fixtures that a test has in common with others; alone it would make them."""
    found = item._fixtureinfo.name2fixturedefs
    return [name for name, made in found.items() if made[-1].scope != "function" and made[-1].baseid]


# The map. ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function or method of a file, with the functions inside of it, or a class's body."""

    name: str  # "Class.method"
    start: int  # its first line, decorators included
    stop: int  # its last line
    body: int  # the first line of its body after the docstring


@cache
def functions_of(path: Path) -> tuple[Function, ...]:
    """Return the functions of a Python file, in order."""

    def walk(nodes: Iterable[ast.stmt], prefix: str) -> Iterator[Function]:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                has_docstring = ast.get_docstring(node, clean=False) is not None and len(node.body) > 1
                first = node.body[1 if has_docstring else 0].lineno
                yield Function(f"{prefix}{node.name}", start, node.end_lineno or start, first)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                yield from walk(node.body, prefix)

    return tuple(walk(ast.parse(path.read_text("utf-8")).body, ""))


@dataclass
class CoverageMap:
    """Tests by what they run.

    Attributes:
        seconds: Seconds of each test that is named.
        files: Seconds of each file of tests.
        runs: Tests of each function, "path::name", and of each other file, "path", the best first.
    """

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    files: dict[str, float] = field(default_factory=dict[str, float])
    runs: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @classmethod
    def read(cls, file: Path = FILE) -> "CoverageMap":
        """Read the map, which is empty if there is no file."""
        if not file.exists():
            return cls()
        content = json.loads(file.read_text("utf-8"))
        tests = [f"{path}::{name}" for path, names in content["tests"].items() for name in names]
        seconds = [each for names in content["tests"].values() for each in names.values()]
        runs = {key: [tests[number] for number in numbers] for key, numbers in content["runs"].items()}
        return cls(dict(zip(tests, seconds, strict=True)), content["files"], runs)

    def write(self, file: Path = FILE) -> None:
        """Write the map, one line for each test file and each function."""
        named = sorted({test for tests in self.runs.values() for test in tests})
        number_of = {test: number for number, test in enumerate(named)}
        tests: dict[str, dict[str, float]] = {}
        for test in named:
            path, _, name = test.partition("::")
            tests.setdefault(path, {})[name] = round(self.seconds[test], 2)
        runs = {key: [number_of[test] for test in self.runs[key]] for key in sorted(self.runs)}
        files = {name: round(self.files[name], 1) for name in sorted(self.files)}
        sections = {"files": files, "tests": tests, "runs": runs}
        text = ",\n".join(f"{json.dumps(name)}: {_lines(section)}" for name, section in sections.items())
        file.write_text(f"{{{text}}}\n", "utf-8")

    def without(self, files: Iterable[str]) -> "CoverageMap":
        """Return the map without the tests of these files."""
        gone, kept = tuple(f"{name}::" for name in files), set(self.files) - set(files)
        runs = {key: [t for t in tests if not t.startswith(gone)] for key, tests in self.runs.items()}
        times = {name: seconds for name, seconds in self.files.items() if name in kept}
        return CoverageMap(self.seconds, times, {key: tests for key, tests in runs.items() if tests})

    def with_measured(self, folder: Path) -> "CoverageMap":
        """Return the map with what was measured in `folder` added; tests that are there before come first."""
        seconds, files, of_files = _tests_in(folder)
        lines = _lines_in(folder)
        lines = {test: found for test, found in lines.items() if seconds.get(test, _SLOW_S) < _SLOW_S}
        found = _ranked(lines, seconds)
        tracked = set(_git("ls-files").splitlines())
        breadth = {test: sum(map(len, by_function.values())) for test, by_function in lines.items()}
        readers = defaultdict[str, list[str]](list)
        for test, names in files.items():
            for name in names:
                if name in tracked and not (name.endswith(".py") and name.startswith((*SOURCES, "tests"))):
                    readers[name].append(test)
        for name, tests in readers.items():
            found[name] = sorted(tests, key=lambda test: (seconds[test], breadth.get(test, 0)))
        runs = dict(self.runs)
        for key, tests in found.items():
            runs[key] = list(dict.fromkeys([*runs.get(key, []), *tests]))[:MOST_TESTS]
        return CoverageMap(self.seconds | seconds, self.files | of_files, runs)


def _lines(section: Mapping[str, Any]) -> str:
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in section.items())
    return f"{{\n{rows}}}"


def _tests_in(folder: Path) -> tuple[dict[str, float], dict[str, set[str]], dict[str, float]]:
    """Return the seconds that each test takes alone, the files that it opened, and the seconds of each file."""
    times, files = dict[str, tuple[float, float, list[str]]](), dict[str, set[str]]()
    for path in folder.glob("tests_*.json"):
        content = json.loads(path.read_text())
        times |= content["seconds"]
        files |= {test: set(names) for test, names in content["files"].items()}
    of_fixtures = defaultdict[tuple[str, str], float](float)
    for test, (setup, _, fixtures) in times.items():
        for name in fixtures:
            key = test.partition("::")[0], name
            of_fixtures[key] = max(of_fixtures[key], setup)
    seconds, of_files = dict[str, float](), defaultdict[str, float](float)
    for test, (setup, rest, fixtures) in times.items():
        of_files[test.partition("::")[0]] += setup + rest
        of_file = [of_fixtures[test.partition("::")[0], name] for name in fixtures]
        seconds[test] = rest + max([setup, *of_file])
    return seconds, files, of_files


_LINES = """
    select file.path, context.context, line_bits.numbits from line_bits
    join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id
"""


def _lines_in(folder: Path) -> dict[str, dict[str, set[int]]]:
    """Return the lines of functions' bodies that each test ran, by "path::function"."""
    found = defaultdict[str, dict[str, set[int]]](lambda: defaultdict(set))
    for path in folder.glob("data*"):
        try:
            with sqlite3.connect(path) as database:
                rows = database.execute(_LINES).fetchall()
        except sqlite3.DatabaseError as error:  # of a process that a test killed while it wrote
            print(f"{path} is left out: {error}", file=sys.stderr)
            continue
        for name, test, bits in rows:
            if test and name.endswith(".py"):  # templates have lines too
                for function, lines in _by_function(name, numbits_to_nums(bits)).items():
                    found[test][function] |= lines
    return found


def _by_function(path: str, lines: Sequence[int]) -> dict[str, set[int]]:
    name, found = Path(path).relative_to(ROOT).as_posix(), dict[str, set[int]]()
    for function in functions_of(Path(path)):
        own = {line for line in lines if function.body <= line <= function.stop}
        if own:
            found[f"{name}::{function.name}"] = own
    return found


def _ranked(lines: Mapping[str, Mapping[str, set[int]]], seconds: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the best tests of each function: cheap and narrow ones, until its lines are run several times."""
    cost = {
        test: (0.1 + seconds[test]) * sum(map(len, functions.values())) ** 0.5
        for test, functions in lines.items()
    }
    tests_of = defaultdict[str, list[str]](list)
    for test, functions in lines.items():
        for function in functions:
            tests_of[function].append(test)
    ranked: dict[str, list[str]] = {}
    for function, tests in tests_of.items():
        runs, chosen, left = Counter[int](), list[str](), sorted(tests, key=lambda test: (cost[test], test))
        for wanted in range(1, RUNS_OF_A_LINE + 1):
            for test in left:
                if len(chosen) < MOST_TESTS and any(runs[line] < wanted for line in lines[test][function]):
                    chosen.append(test)
                    runs.update(lines[test][function])
            left = [test for test in left if test not in chosen]
        ranked[function] = [*chosen, *_varied(left)][:MOST_TESTS]
    return ranked


def _varied(tests: Sequence[str]) -> list[str]:
    """Put the first case of each test before the second ones."""
    numbers, seen = list[int](), Counter[str]()
    for test in tests:
        seen[test.partition("[")[0]] += 1
        numbers.append(seen[test.partition("[")[0]])
    return [test for _, test in sorted(zip(numbers, tests, strict=True), key=lambda each: each[0])]


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Run tests, and write the map; failed tests are in it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files of tests; default: all suites of the map")
    parser.add_argument("--measured", type=Path, help="build the map of what a run left in this folder")
    options = parser.parse_args()
    folder = options.measured or Path(tempfile.mkdtemp(prefix="measured_"))
    if options.measured is None:
        print(f"measuring in {folder}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow"]
        command += [*(f"--deselect={test}" for test in _NOT_MEASURED), "-p", "tests.coverage_map"]
        command += options.tests or SUITES
        environment = os.environ | {FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
    before = CoverageMap.read() if options.tests else CoverageMap()
    gone = [name for name in before.files if not (ROOT / name).exists()]
    made = before.without([*options.tests, *gone]).with_measured(folder)
    made.write()
    shutil.rmtree(folder)
    print(f"{FILE.relative_to(ROOT)}: {len(made.runs)} functions and files, {FILE.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
