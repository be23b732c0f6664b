"""Writes the tables of versions and of optional libraries in the installation guide.

    make versions

`tests/versions.jsonl` has one line for each suite and set of versions: the date, and how many tests of each
file passed, failed and were left out. `make test RECORD=1`, and the other targets with tests, write it
(`tests/recording.py`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.runtime.libraries import OPTIONAL_LIBRARIES, TESTED

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = Path("tests/versions.jsonl"), Path("examples/guides/installing.md")
SUITES = ("unit", "distributed", "faults", "recipes", "slurm", "sglang")
"""Folders of tests/ in the order of the tables. Programs that are not tests follow."""
FEATURES: Mapping[str, tuple[str, ...]] = {
    "log-probs, Top-K, routes": ("test_engine.py", "test_client.py", "test_server_is_real.py"),
    "three weight syncs": ("test_weight_sync.py",),
    "pause, continue, flush": ("test_pause.py", "test_flush.py"),
    "partials": ("test_partials.py",),
    "retractions": ("test_retractions.py",),
    "turns": ("test_turns.py", "test_gpu_turns.py"),
    "asynchronous": ("test_ahead.py",),
    "faults": ("test_sync_faults.py", "test_proxy_faults.py", "test_several_servers.py"),
    "whole runs": ("test_training.py", "test_evaluate.py", "test_mismatch.py"),
    "model families": ("test_served_families.py",),
}
"""Files of tests/sglang by the server feature that they test."""
_INSTALLED = {"on GPUs: torch": "torch", "transformers": "transformers", "NCCL": "nvidia-nccl-cu13"}
Record = dict[str, Any]
"""A line of the records: suite, date of the oldest result, versions, and test counts per file."""


def read_pins(file: Path) -> dict[str, str]:
    """Return the versions that a file of requirements pins."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def gpu_pins(sglang: str) -> dict[str, str]:
    """Return what `make sglang-venv SGLANG_FOR=gpu` installs with a version of SGLang."""
    return read_pins(ROOT / f"tests/sglang/requirements-gpu/{sglang}.txt")


def read_records(root: Path) -> list[Record]:
    """Read all records, in file order."""
    path = root / RECORDS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def counts(files: Iterable[Sequence[int]]) -> list[int]:
    """Return how many tests of some files passed, failed and were left out (marked slow, or without a GPU)."""
    return [sum(column) for column in zip((0, 0, 0), *files, strict=True)]


def libraries_table() -> str:
    """Return the table of optional libraries, in addition to Megatron-Core."""
    rows = ([of.name, of.used_for, of.since, of.installed_by, of.without] for of in OPTIONAL_LIBRARIES)
    return _markdown([["library", "used for", "from", "on a GPU machine", "without it"], *rows])


def versions_tables(root: Path) -> str:
    """Return the tables of tested trainer versions and of tested server versions."""
    trainers: dict[tuple[str, ...], list[Record]] = {}
    first = [[*TESTED, "what passed", "date"]]
    second = [["SGLang", *_INSTALLED, "tests: torch", *FEATURES, "all of tests/sglang", "date"]]
    for each in read_records(root):
        if each["suite"] != "sglang":
            trainers.setdefault(tuple(str(each["versions"][name]) for name in TESTED), []).append(each)
            continue
        pins = gpu_pins(each["versions"]["sglang"])
        names = [pins["sglang"], *(pins[name] for name in _INSTALLED.values())]
        features = [_feature(each["files"], files) for files in FEATURES.values()]
        tested = each["versions"]["server torch"]
        second.append([*names, tested, *features, _outcome(root, each), each["date"]])
    for found, of_them in trainers.items():
        passed = "; ".join(f"{each['suite']}: {_outcome(root, each)}" for each in of_them)
        first.append([*found, passed, min(each["date"] for each in of_them)])
    return f"{_markdown(first)}\n{_markdown(second)}"


def _outcome(root: Path, each: Record) -> str:
    if each["suite"] not in SUITES:
        return "ran"
    passed, failed, left_out = counts(each["files"].values())
    there = {path.name for path in (root / "tests" / each["suite"]).glob("test_*.py")}
    missing = len(there - each["files"].keys())
    rest = {"failed": failed, "left out": left_out, f"of {len(there)} files not run": missing}
    return ", ".join([f"{passed:,}", *(f"{number:,} {what}" for what, number in rest.items() if number)])


def _feature(files: Mapping[str, Sequence[int]], names: Sequence[str]) -> str:
    passed, failed, left_out = counts(files[name] for name in names if name in files)
    if failed:
        return "no"
    if not passed or not files.keys() >= set(names):
        return "not run"
    return "in part" if left_out else "yes"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], f"|{'---|' * len(rows[0])}\n", *lines[1:]])


def with_tables(page: str, root: Path) -> str:
    """Return the page with new tables between its marks."""
    for what, text in (("versions", versions_tables(root)), ("libraries", libraries_table())):
        begin, end = f"<!-- {what}: written by `make versions` -->\n", f"<!-- end of {what} -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}{text}{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Write the tables of versions."""
    page = ROOT / PAGE
    page.write_text(with_tables(page.read_text(encoding="utf-8"), ROOT), encoding="utf-8")


if __name__ == "__main__":
    main()
