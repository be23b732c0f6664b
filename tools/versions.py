"""Writes the tables of versions and of optional libraries in the installation guide.

    make versions

`tests/versions.jsonl` has one line for each suite and set of versions: the date, and how many tests of each
file passed, failed and were left out. `make test RECORD=1`, and the other targets with tests, write it. For
programs that are not tests, this command writes it: `python -m tools.versions --ran quickstart`.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dppo.runtime.libraries import OPTIONAL_LIBRARIES, TESTED, installed_versions

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = Path("tests/versions.jsonl"), Path("examples/guides/installing.md")
MARKS: Mapping[str, tuple[str, str]] = {
    what: (f"<!-- {what}: written by `make versions` -->\n", f"<!-- end of {what} -->")
    for what in ("versions", "libraries")
}
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


@dataclass(frozen=True)
class Outcome:
    """Number of tests by result, in one file or in several."""

    passed: int = 0
    failed: int = 0
    left_out: int = 0  # tests that are marked slow or need a GPU

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(self.passed + other.passed, self.failed + other.failed, self.left_out + other.left_out)


@dataclass(frozen=True)
class Record:
    """Results of one suite with one set of versions."""

    suite: str
    date: str  # date of the oldest result
    versions: Mapping[str, str | None]
    files: Mapping[str, Outcome]

    @property
    def total(self) -> Outcome:
        """Sum of the results of all files."""
        return sum(self.files.values(), Outcome())


def versions_of(python: str, names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages of another interpreter."""
    program = f"import importlib.metadata as m, json; print(json.dumps([m.version(n) for n in {list(names)}]))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: version.partition("+")[0] for name, version in zip(names, found, strict=True)}


def read_records(root: Path) -> list[Record]:
    """Read all records, in file order."""
    path = root / RECORDS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [_record(json.loads(line)) for line in lines]


def _record(line: dict[str, Any]) -> Record:
    files = {name: Outcome(*counts) for name, counts in line["files"].items()}
    return Record(line["suite"], line["date"], line["versions"], files)


def record(
    root: Path, suite: str, versions: Mapping[str, str | None], files: Mapping[str, Outcome], date: str
) -> None:
    """Record the results of these files. Other files of the record stay, and then also its date."""
    records = read_records(root)
    before = next((each for each in records if (each.suite, each.versions) == (suite, versions)), None)
    merged, since = dict(files), date
    if before is not None:
        kept = {name: found for name, found in before.files.items() if name not in files}
        merged = kept | merged
        since = min(before.date, date) if kept else date
    records = [each for each in records if each is not before]
    records.append(Record(suite, since, versions, dict(sorted(merged.items()))))
    records.sort(key=lambda each: (sorted(each.versions.items()), _place(each.suite)))
    lines = [
        {**asdict(each), "files": {name: list(asdict(found).values()) for name, found in each.files.items()}}
        for each in records
    ]
    (root / RECORDS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _place(suite: str) -> tuple[int, str]:
    return (SUITES.index(suite) if suite in SUITES else len(SUITES)), suite


def libraries_table() -> str:
    """Return the table of optional libraries, in addition to Megatron-Core."""
    rows = [
        [each.name, each.used_for, each.since, each.installed_by, each.without] for each in OPTIONAL_LIBRARIES
    ]
    return _markdown([["library", "used for", "from", "on a GPU machine", "without it"], *rows])


def versions_tables(root: Path) -> str:
    """Return the tables of tested trainer versions and of tested server versions."""
    records = read_records(root)
    trainers: dict[tuple[str, ...], list[Record]] = {}
    for each in records:
        if each.suite != "sglang":
            trainers.setdefault(tuple(str(each.versions[name]) for name in TESTED), []).append(each)
    first = [[*TESTED, "what passed", "date"]]
    for found, of_them in trainers.items():
        passed = "; ".join(f"{each.suite}: {_outcome(root, each)}" for each in of_them)
        first.append([*found, passed, min(each.date for each in of_them)])
    second = [["SGLang", "its torch", "its transformers", *FEATURES, "all of tests/sglang", "date"]]
    for each in records:
        if each.suite == "sglang":
            names = ("sglang", "server torch", "server transformers")
            features = [_feature(each, files) for files in FEATURES.values()]
            second.append(
                [*(str(each.versions[name]) for name in names), *features, _outcome(root, each), each.date]
            )
    return f"{_markdown(first)}\n{_markdown(second)}"


def _outcome(root: Path, each: Record) -> str:
    total, folder = each.total, root / "tests" / each.suite
    if each.suite not in SUITES:
        return "ran"
    text = f"{total.passed:,}"
    if total.failed:
        text += f", {total.failed} failed"
    if total.left_out:
        text += f", {total.left_out:,} left out"
    there = {path.name for path in folder.glob("test_*.py")}
    missing = len(there - each.files.keys())
    return text + (f", {missing} of {len(there)} files not run" if missing else "")


def _feature(each: Record, files: Iterable[str]) -> str:
    found = [each.files[name] for name in files if name in each.files]
    total = sum(found, Outcome())
    if total.failed:
        return "no"
    if not total.passed or len(found) < len(list(files)):
        return "not run"
    return "in part" if total.left_out else "yes"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join([lines[0], f"|{'---|' * len(rows[0])}\n", *lines[1:]])


def with_tables(page: str, root: Path) -> str:
    """Return the page with new tables between its marks."""
    for what, text in (("versions", versions_tables(root)), ("libraries", libraries_table())):
        begin, end = MARKS[what]
        head, rest = page.split(begin)
        page = f"{head}{begin}{text}{end}{rest.split(end)[1]}"
    return page


def main(
    ran: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Record that NAME ran to its end today with the installed versions."),
    ] = None,
) -> None:
    """Write the tables of versions, or record a run of a program that is not a test."""
    if ran is not None:
        today = datetime.now(UTC).date().isoformat()
        record(ROOT, ran, installed_versions(), {ran: Outcome(passed=1)}, today)
        return
    page = ROOT / PAGE
    page.write_text(with_tables(page.read_text(encoding="utf-8"), ROOT), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(typer.run(main))
