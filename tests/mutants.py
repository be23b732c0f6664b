"""Plants one-line faults in a copy of the package, and reports which ones the tests notice: `make mutants`.

cosmic-ray names the places of faults and writes them. A fault is tried with the tests that `make quick` selects
for its line. If they pass, it is tried with the complete files of these tests.

python -m tests.mutants --number 200 --seed 0 --minutes 120
python -m tests.mutants --only rollout --number 20
"""

# pyright: reportMissingImports=false
# cosmic-ray is installed by `make mutants` alone.
import argparse
import ast
import difflib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from tests import quick
from tests.coverage_map import CoverageMap

ROOT = Path(__file__).resolve().parents[1]
# What the faults are planted in, by the name of the row of the table.
PACKAGES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "data/batches": ("data/batches",),
    "actor": ("actor",),
    "algorithms": ("algorithms",),
    "routing_replay": ("routing_replay",),
    "engines/weight_sync": ("engines/weight_sync",),
    "engines/sglang": ("engines/sglang/protocol.py", "engines/sglang/replies.py"),
    "agents": ("agents/episode.py", "agents/tree.py"),
    "run": ("run/checkpoints.py", "run/recovery.py", "run/history.py"),
    "config": ("config/resuming.py",),
    "analysis": (
        *("analysis/contrasts.py", "analysis/lines.py", "analysis/report/numbers.py"),
        *("analysis/mismatch/results.py", "analysis/what_if/measures.py", "metrics/alarms.py"),
    ),
}
WIDENED_S = 120.0  # of complete files, if the chosen tests pass
Outcome = Literal["noticed", "timed out", "survived", "untested"]
_LIBRARIES = ("torch", "transformers", "pytest", "xdist", "pydantic", "hypothesis", "megatron.core.optimizer")
_TRIVIAL = ("RemoveDecorator", "Variable", "ExceptionReplacer")  # ends each import, or needs arguments
_SAME = ("Eq_Is", "NotEq_IsNot")  # equal small numbers and short names are the same object in CPython


@dataclass(frozen=True)
class Mutant:
    """One fault: an operator of cosmic-ray at a place of a file."""

    path: str
    line: int
    operator: str
    occurrence: int

    def changed(self) -> str | None:
        """Return the file with the fault; None if that is no program, as some operators make of `**`."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        before = (ROOT / self.path).read_text("utf-8")
        after = mutate_code(before, get_operator(self.operator)(), self.occurrence)
        assert after is not None, self
        try:
            ast.parse(after)
        except SyntaxError:
            return None
        return after

    def plant(self, root: Path) -> str:
        """Write the fault into the file of a copy, and return the changed line."""
        before, after = (ROOT / self.path).read_text("utf-8"), self.changed()
        assert after is not None, self
        (root / self.path).write_text(after, "utf-8")
        changes = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        return " / ".join(line[:1] + " " + line[1:].strip() for line in list(changes)[3:])


def mutants_of(path: str) -> dict[tuple[int, int], list[Mutant]]:
    """Return the faults of a file by their place (line, column), without those in annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / path).read_text("utf-8")
    left_out = set(_annotations(ast.parse(source)))
    nodes, places = list(ast_nodes(get_ast(source))), defaultdict[tuple[int, int], list[Mutant]](list)
    for name in operator_names():
        if name.rpartition("/")[2].startswith(_TRIVIAL) or name.endswith(_SAME) or "NoOp" in name:
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for place, _ in operator.mutation_positions(node):
                if not any(start <= place < stop for start, stop in left_out):
                    places[place].append(Mutant(path, place[0], name, occurrence))
                occurrence += 1
    return places


def _annotations(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the places of annotations and decorators, and of what only type checkers read."""
    for node in ast.walk(tree):
        found: list[ast.AST | None] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        found += getattr(node, "decorator_list", [])
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found.append(node)
        for each in filter(None, found):
            place: Any = each
            yield (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)


def drawn(packages: Iterable[str], number: int, seed: int) -> list[Mutant]:
    """Draw faults: the same number from each package, and each place in it with equal probability."""
    generator, chosen = random.Random(seed), list[list[Mutant]]()
    for package in packages:
        roots = [ROOT / "megatron_dppo" / name for name in PACKAGES[package]]
        files = sorted(file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root]))
        places = [found for file in files for found in mutants_of(str(file.relative_to(ROOT))).values()]
        generator.shuffle(places)
        chosen.append([generator.choice(place) for place in places])
    in_turn = (column[i] for i in range(max(map(len, chosen))) for column in chosen if i < len(column))
    return list(islice((mutant for mutant in in_turn if mutant.changed() is not None), number))


class Workshop:
    """Copies of the tree, in which faults are planted and tried."""

    def __init__(self, folder: Path, num_jobs: int) -> None:
        """Copy the tree, and import the libraries that all trials need."""
        names = subprocess.run(
            ("git", "ls-files", "--cached", "--others", "--exclude-standard"),
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        self._free = [folder / f"copy{number}" for number in range(num_jobs)]
        for copy in self._free:
            for name in names:
                if (ROOT / name).exists():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
        self._runs, self._lock = CoverageMap.read(), Lock()
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in _LIBRARIES:
            importlib.import_module(name)

    def try_out(self, mutant: Mutant) -> tuple[Outcome, str, float]:
        """Return whether tests notice a fault, the line as it was and is, and the seconds."""
        started = time.perf_counter()
        with self._lock:
            copy = self._free.pop()
        try:
            line = mutant.plant(copy)
            tests = quick.tests_of({mutant.path: frozenset({mutant.line})}, self._runs, copy)
            if tests == [quick.SMOKE]:
                return "untested", line, 0.0
            outcome = self._outcome(copy, tests)
            if outcome == "survived":
                outcome = self._outcome(copy, self._widened(tests))
            return outcome, line, time.perf_counter() - started
        finally:
            shutil.copy2(ROOT / mutant.path, copy / mutant.path)
            with self._lock:
                self._free.append(copy)

    def _widened(self, tests: Sequence[str]) -> list[str]:
        """Return complete files of the tests, until they take too long."""
        files, seconds = dict.fromkeys(test.partition("::")[0] for test in tests), 0.0
        chosen = list[str]()
        for file in sorted(files, key=lambda name: self._runs.files.get(name, 1.0)):
            seconds += self._runs.files.get(file, 1.0)
            if seconds <= WIDENED_S:
                chosen.append(file)
        return chosen

    def _outcome(self, copy: Path, tests: Sequence[str]) -> Outcome:
        seconds = sum(self._runs.seconds.get(t) or self._runs.files.get(t, 1.0) for t in tests)
        process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, list(tests)))
        with self._lock:
            process.start()
        has_ended = bool(wait([process.sentinel], 120 + 6 * seconds))
        with self._lock:  # `start` of the other thread reads the status of all that have ended
            if not has_ended:
                _end(process)
                return "timed out"
            process.join()
            return "survived" if process.exitcode == 0 else "noticed"


def _run_tests(copy: Path, tests: list[str]) -> None:
    """Run tests of a copy in this process, which has imported the libraries and nothing of the package."""
    import pytest

    os.setsid()
    with (copy.parent / f"{copy.name}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    os.environ |= {"PYTHONPATH": str(copy), quick.CHOSEN: json.dumps(tests), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.quick", *files])
    sys.stdout.flush()
    os._exit(0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1)


def _end(process: BaseProcess) -> None:
    """Kill a process and those that it started."""
    assert process.pid is not None
    os.killpg(process.pid, 9)
    process.join()


def main() -> int:
    """Draw faults, try them, and print a table of what was noticed and the faults that were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200, help="faults to draw (default: 200)")
    parser.add_argument("--after", type=int, default=0, help="continue after so many of them (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--minutes", type=float, default=120.0, help="start no fault after this time (120)")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at once (default: 2)")
    parser.add_argument("--only", choices=PACKAGES, action="append", help="a package; default: all")
    options = parser.parse_args()
    mutants = drawn(options.only or PACKAGES, options.number, options.seed)[options.after :]
    end = time.monotonic() + 60 * options.minutes
    results: dict[Mutant, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        workshop = Workshop(Path(folder), options.jobs)

        def work(mutant: Mutant) -> None:
            if time.monotonic() < end:
                outcome, line, seconds = workshop.try_out(mutant)
                results[mutant] = outcome
                place = f"{mutant.path.removeprefix('megatron_dppo/')}:{mutant.line}"
                print(f"{len(results):3} {outcome:9} {seconds:4.0f} s  {place}  {line}", flush=True)

        list(pool.map(work, mutants))
    print(_table(results, options.seed))
    return 0


def _table(results: dict[Mutant, Outcome], seed: int) -> str:
    rows = [f"| package | planted | noticed | share | (seed {seed})", "|---|---|---|---|"]
    total = [0, 0]
    for package, names in PACKAGES.items():
        roots = tuple(f"megatron_dppo/{name}" for name in names)
        own = [outcome for mutant, outcome in results.items() if mutant.path.startswith(roots)]
        noticed = sum(outcome in ("noticed", "timed out") for outcome in own)
        total = [total[0] + len(own), total[1] + noticed]
        if own:
            rows.append(f"| `{package}` | {len(own)} | {noticed} | {100 * noticed / len(own):.0f} % |")
    planted, noticed = total
    return "\n".join([*rows, f"| all | {planted} | {noticed} | {100 * noticed / max(planted, 1):.0f} % |"])


if __name__ == "__main__":
    sys.exit(main())
