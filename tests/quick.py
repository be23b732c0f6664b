"""Runs lint and the tests that run what changed: `make quick`. `tests/coverage_map.json` maps code to tests.

python tests/quick.py                 # changes since the branch left main, uncommitted and new files too
python tests/quick.py --since HEAD~3
python tests/quick.py --show          # only prints the commands
"""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.coverage_map import CoverageMap, functions_of  # noqa: E402 - started as a script

CHOSEN = "QUICK_TESTS"
"""Name of the environment variable with the chosen tests, for the plugin that this module is."""
BIN = Path(sys.executable).parent
SMOKE = "tests/unit/test_algorithms_vectors.py"  # if no test is known to run what changed
ENGINE_TO_BATCH = "tests/distributed/test_engine_to_batch.py"
SIGNS = "tests/unit/test_algorithms_signs.py"  # other tests have equal thresholds on both sides
# A change of these can change what trains, whichever line it is in.
BETWEEN_ENGINE_AND_LOSS = tuple(
    f"megatron_dppo/{name}"
    for name in (
        *("actor/", "agents/", "data/batches/", "engines/", "rollout/", "routing_replay/", "run/"),
        *("train.py", "types.py"),
    )
)
SECONDS = 40.0  # of tests, on two cores, without ENGINE_TO_BATCH
MOST_CALLERS = 60  # files whose types are checked because they name what changed
LINT = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("lint-imports",),
    ("python", "tests/lint/size_limits.py"),
)
Lines = frozenset[int]


def main() -> int:
    """Lint, check the types of changed files and of callers, and run tests. Return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="default: the commit at which the branch left main")
    parser.add_argument("--show", action="store_true", help="print the commands and run none")
    options = parser.parse_args()
    started = time.perf_counter()
    changed = changed_lines(options.since or _git("merge-base", "HEAD", "main"))
    tests = tests_of(changed, CoverageMap.read())
    files = [
        file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if (ROOT / file).exists()
    ]
    python = files_to_check(changed)
    # pyright uses one core, and the linters take few seconds.
    first = [("pyright", *python)] if python else []
    pytest = ("python", "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "worksteal", "-p", "tests.quick")
    second = [*LINT, (*pytest, *files)]
    if options.show:
        print("\n".join([*tests, *(shlex.join(command) for command in [*second, *first])]))
        return 0
    print(f"{len(changed)} changed files; tests of {' '.join(files)}", flush=True)
    os.environ |= {CHOSEN: json.dumps(tests), "OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(_run_all, (first, second)))
    print(f"{'passed' if all(outcomes) else 'FAILED'} in {time.perf_counter() - started:.0f} s")
    return 0 if all(outcomes) else 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that were not chosen. All cases of a test stay if the chosen ones are gone."""
    chosen = set(json.loads(os.environ.get(CHOSEN, "[]")))
    if not chosen:
        return
    there = {item.nodeid for item in items}
    whole = {test.partition("[")[0] for test in chosen - there} | (chosen - there)

    def is_chosen(item: pytest.Item) -> bool:
        path, function = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        return item.nodeid in chosen or path in chosen or function in whole

    left_out = [item for item in items if not is_chosen(item)]
    items[:] = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=left_out)


def changed_lines(since: str, root: Path = ROOT) -> dict[str, Lines]:
    """Return the lines that differ from a commit, by file as it is now. All lines of a new file count.

    Where lines were only removed, the line before counts.
    """
    found: dict[str, set[int]] = {}
    diff = _git("diff", "--unified=0", "--no-color", "--no-ext-diff", "--diff-filter=d", since, root=root)
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ ").removeprefix("b/").rstrip("\t")
            found.setdefault(name, set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            found[name] |= set(range(max(start, 1), start + max(count, 1)))
    for name in _git("ls-files", "--others", "--exclude-standard", root=root).splitlines():
        found[name] = set(range(1, (root / name).read_bytes().count(b"\n") + 2))
    return {name: frozenset(lines) for name, lines in sorted(found.items())}


def tests_of(changed: Mapping[str, Lines], runs: CoverageMap, root: Path = ROOT) -> list[str]:
    """Return node ids of tests, and whole files, that run or read what changed.

    A changed function gets the tests that the map has for it, and a line outside of functions the tests of the
    complete file. If they take too long together, each function and file gets some of its tests.
    """
    chosen: dict[str, None] = {}
    queues: list[list[str]] = []
    for name, lines in changed.items():
        if name.startswith(BETWEEN_ENGINE_AND_LOSS):
            chosen[ENGINE_TO_BATCH] = None
        if name.startswith("megatron_dppo/algorithms/"):
            chosen[SIGNS] = None
        if re.fullmatch(r"tests/(unit|distributed|faults|recipes)/test_\w+\.py", name):
            queues.append(_changed_tests(root / name, name, lines))
        queues += [tests for key in keys_of(name, lines, root) if (tests := known(key, runs))]
    left, seconds = [list(queue) for queue in queues], 0.0
    while any(left):
        for queue in left:
            if not queue:
                continue
            test = queue.pop(0)
            if test in chosen or test.partition("::")[0] in chosen:
                continue
            seconds += runs.seconds.get(test) or runs.files.get(test, 1.0)
            if seconds > 2 * SECONDS and chosen:
                return list(chosen)
            chosen[test] = None
    return list(chosen) or [SMOKE]


def keys_of(name: str, lines: Lines, root: Path = ROOT) -> list[str]:
    """Return the keys of the map for changed lines of a file: its changed functions, or the file."""
    if not name.endswith(".py") or not (root / name).exists():
        return [name]
    functions = functions_of(root / name)
    inside = [each for each in functions if any(each.start <= line <= each.stop for line in lines)]
    covered = {line for each in inside for line in range(each.start, each.stop + 1)}
    source = (root / name).read_text("utf-8").splitlines()
    outside = {line for line in lines - covered if line <= len(source) and source[line - 1].strip()}
    return [*(f"{name}::{each.name}" for each in inside), *([name] if outside else [])]


def known(key: str, runs: CoverageMap) -> list[str]:
    """Return the tests of a function or file. If the map lacks it, return its neighbours' tests."""
    if tests := runs.runs.get(key):
        return tests
    path, _, _ = key.partition("::")
    for prefix in (f"{path}::", f"{path.rpartition('/')[0]}/"):
        found = [tests for other, tests in runs.runs.items() if other.startswith(prefix)]
        if found:
            return interleaved(found)
    return []


def interleaved(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the first of each list, then the second of each, without repetitions."""
    columns = [list(each) for each in lists]
    longest = max(map(len, columns), default=0)
    return list(dict.fromkeys(column[i] for i in range(longest) for column in columns if i < len(column)))


def _changed_tests(path: Path, name: str, lines: Lines) -> list[str]:
    """Return the changed tests of a file, or the file if what they have in common changed too."""
    tests = [each for each in functions_of(path) if each.name.startswith("test_")]
    changed = [each for each in tests if any(each.start <= line <= each.stop for line in lines)]
    inside = {line for each in changed for line in range(each.start, each.stop + 1)}
    return [name] if lines - inside else [f"{name}::{each.name}" for each in changed]


# Types ---------------------------------------------------------------------------------------------


def files_to_check(changed: Mapping[str, Lines], root: Path = ROOT) -> list[str]:
    """Return the changed Python files, and files that name something whose declaration changed."""
    python = [name for name in changed if name.endswith(".py") and (root / name).exists()]
    tracked = _git("ls-files", "*.py", root=root).splitlines()
    words = {name: set(re.findall(r"\w+", (root / name).read_text("utf-8"))) for name in tracked}
    num_files = Counter(word for found in words.values() for word in found)
    importers, others = dict[str, None](), dict[str, None]()
    for name in set(python) & words.keys():
        names = {each for each in declared(root / name, changed[name]) if not each.startswith("test_")}
        rare = {each for each in names if num_files[each] <= MOST_CALLERS}
        module = set(name.removesuffix(".py").split("/"))
        for other in tracked:
            if names & words[other] and module <= words[other]:
                importers[other] = None
            elif rare & words[other]:
                others[other] = None
    callers = [name for name in {**importers, **others} if name not in changed]
    return [*python, *callers[:MOST_CALLERS]]


def declared(path: Path, lines: Lines) -> set[str]:
    """Return names of functions, classes, fields and constants whose declaration is in these lines."""
    found = set[str]()

    def walk(nodes: Iterable[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                if node.lineno in lines:
                    found.add(node.name)
                walk(node.body)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if lines & set(range(node.lineno, max(node.body[0].lineno, node.lineno + 1))):
                    found.add(node.name)
            elif lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                found.update(target.id for target in targets if isinstance(target, ast.Name))

    walk(ast.parse(path.read_text("utf-8")).body)
    return {name for name in found if len(name) > 2 and not name.startswith("__")}


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
