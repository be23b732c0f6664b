"""Every fault at every moment: does the run end promptly, and is the resumed run the one that was not stopped?

python -m tests.faults.campaign                the whole campaign, about 25 minutes on 2 cores
python -m tests.faults.campaign --only NAME    cases whose name holds NAME
python -m tests.faults.campaign --write        also put the rows of these cases into tests/faults/README.md
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from tests.faults.cases import CASES, Case
from tests.faults.starting import start_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings, without_clocks

_LIMIT_S = 600  # nothing here takes longer, unless it hangs


@dataclass(frozen=True)
class Ended:
    """How the processes of one start ended."""

    codes: list[int]
    seconds: float  # until the last one was gone
    log: str


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    case: Case
    failures: list[str]  # what was not as it should be
    codes: list[int]
    end_s: float  # from the fault to the end of the last process
    recover_s: float  # from the resumed run's start to its first new gradient step; 0 if not resumed
    num_lost: int  # rows and samples of the uninterrupted run that are missing
    num_duplicated: int
    is_equal: bool | None  # weights, moments and random states to the last bit; None if the fault changes them


@dataclass
class Campaign:
    """The tiny model, and the uninterrupted runs that cases are compared with."""

    folder: Path
    references: dict[str, Path] = field(default_factory=dict[str, Path])

    def __post_init__(self) -> None:
        make_task(self.folder)

    def run(self, case: Case) -> Outcome:
        """Start with the fault, then again without it until the run is over, and compare."""
        reference = self._reference(case)
        tables = self._tables(case, f"run_{len(list(self.folder.iterdir()))}")
        run = Path(tables["run"]["folder"])
        faults = [fault for fault in (case.fault, *case.more_faults) if fault is not None]
        first = start(run, tables, case.num_processes, faults, case.signals)
        failures = [f"ended with {first.codes}"] if not case.is_end_expected(first.codes) else []
        failures += [f"log lacks {words!r}" for words in case.log if words not in first.log]
        if case.last_line is not None and case.last_line not in "\n".join(first.log.splitlines()[-60:]):
            failures.append(f"log does not end with {case.last_line!r}")
        recover_s = 0.0
        if case.damage is not None:
            case.damage(run)
        if case.resumed_fault is not None:
            between = start(run, tables, case.num_processes, [case.resumed_fault], ())
            if set(between.codes) != {1} or "StorageError" not in between.log:
                failures.append(f"resumed run with a fault ended with {between.codes}: {between.log[-2000:]}")
        if case.is_resumed:
            again = start(run, tables, case.num_processes, (), ())
            if any(code != case.resumed_exit for code in again.codes):
                failures.append(f"resumed run ended with {again.codes}: {again.log[-2000:]}")
            failures += [f"resumed log lacks {words!r}" for words in case.resumed_log if words not in again.log]
            recover_s = again.seconds
        num_lost, num_duplicated = compare_rows(reference, run) if case.is_compared else (0, 0)
        is_equal = equal_states(reference, run) if case.is_compared else None
        failures += ["rows lost or duplicated"] if num_lost or num_duplicated else []
        failures += ["not the uninterrupted run's weights"] if is_equal is False else []
        failures += list(case.check(run)) if case.check is not None else []
        outcome = Outcome(
            case, failures, first.codes, first.seconds, recover_s, num_lost, num_duplicated, is_equal
        )
        if not failures:
            shutil.rmtree(run, ignore_errors=True)  # a run that is refused has none
        return outcome

    def _tables(self, case: Case, name: str) -> dict[str, Any]:
        changes: dict[str, dict[str, Any]] = {
            "run": {"num_rollouts": 3},
            "parallel": {"expert": case.num_processes},
            "data": {"reward": "tests.faults.rewards:digits"},
            "checkpoint": {"every": 1, "every_steps": 1, "reserve_gib": 0.0},
            "evaluation": {
                "sets": {"held_out": {"prompts": str(self.folder / "held_out.jsonl")}},
                "samples_per_prompt": 1,
                "every": 2,
            },
            "tracking": {"samples_every": 1},
        }
        for section, table in case.config.items():
            changes[section] = changes.get(section, {}) | table
        return settings(self.folder, name, **changes)

    def _reference(self, case: Case) -> Path:
        """The uninterrupted run of the same config, made once."""
        key = json.dumps([case.num_processes, case.config if case.is_compared else {}], sort_keys=True)
        if key not in self.references:
            tables = self._tables(case if case.is_compared else Case("", "", case.num_processes), "")
            tables["run"]["folder"] = str(self.folder / f"reference_{len(self.references)}")
            self.references[key] = Path(tables["run"]["folder"])
            ended = start(self.references[key], tables, case.num_processes, (), ())
            assert not any(ended.codes), ended.log
        return self.references[key]


def start(
    run: Path,
    tables: dict[str, Any],
    num_processes: int,
    faults: Sequence[dict[str, Any]],
    signals: Sequence[tuple[str, str]],
) -> Ended:
    """Run all ranks to their end, one log for all, as a launcher would; nothing restarts or kills them.

    Args:
        run: The run folder.
        tables: The config.
        num_processes: Ranks.
        faults: What `rank.py` is to do, on which rank, when.
        signals: (what the log must hold, which signal): sent to every rank as soon as it does.
    """
    job = run.with_suffix(".job")
    job.mkdir(exist_ok=True)
    config, log = job / "config.toml", job / f"log_{time.time_ns()}.txt"
    config.write_text(tomli_w.dumps(tables))
    log.touch()
    started = time.monotonic()
    ranks = start_ranks(num_processes, config, faults, log)
    struck = started
    waiting = list(signals)
    try:
        while any(rank.is_alive() for rank in ranks) and time.monotonic() - started < _LIMIT_S:
            if waiting and waiting[0][0] in log.read_text():
                for rank in ranks:
                    if rank.is_alive() and rank.pid is not None:
                        os.kill(rank.pid, getattr(signal, waiting[0][1]))
                struck = time.monotonic()
                waiting.pop(0)
            time.sleep(0.05)
        ended = time.monotonic()
    finally:
        hanging = [rank for rank in ranks if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
    text = log.read_text() + ("\nHUNG: the campaign had to kill it" if hanging else "")
    marks = [line.split() for line in text.splitlines() if line.startswith("FAULT ")]
    seconds = ended - (float(marks[0][1]) if marks else struck)
    codes = [rank.exitcode for rank in ranks if rank.exitcode is not None]
    return Ended(codes, seconds, text)


def compare_rows(reference: Path, run: Path) -> tuple[int, int]:
    """(lost, duplicated) rows of metrics.jsonl and samples, against the uninterrupted run."""

    def rows(folder: Path) -> list[str]:
        metrics = metrics_of(folder)
        samples = [line for file in sorted((folder / "samples").iterdir()) for line in file.open()]
        return [json.dumps(row, sort_keys=True) for row in without_clocks(metrics)] + samples

    wanted, found = rows(reference), rows(run)
    lost = sum(row not in found for row in wanted)
    duplicated = len(found) - len(set(found)) + sum(row not in wanted for row in set(found))
    return lost, duplicated


def equal_states(reference: Path, run: Path) -> bool:
    """Whether the last checkpoints hold the same weights, moments and random states, bit for bit."""

    def sums(folder: Path) -> dict[str, str]:
        checkpoints = folder / "checkpoints"
        last = checkpoints / (checkpoints / "latest").read_text().strip()
        lines = [line.split() for line in (last / "SHA256SUMS").read_text().splitlines()]
        return {name: digest for digest, name in lines if name.endswith((".distcp", ".pt", ".safetensors"))}

    return sums(reference) == sums(run)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown."""
    heads = ("fault", "moment", "processes", "exit codes", "end, s", "resumed run, s")
    heads += ("rows and samples lost / duplicated", "final state equal")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for outcome in outcomes:
        case = outcome.case
        equal = {True: "yes", False: "**no**", None: "n/a"}[outcome.is_equal]
        rows = f"{outcome.num_lost} / {outcome.num_duplicated}" if case.is_compared else "n/a"
        recovered = f"{outcome.recover_s:.0f}" if case.is_resumed else "n/a"
        codes = ", ".join(map(str, outcome.codes))
        cells = (case.what, case.moment, case.num_processes, codes, f"{outcome.end_s:.1f}", recovered, rows)
        lines.append(f"| {' | '.join(map(str, cells))} | {equal if not outcome.failures else '**failed**'} |")
    return "\n".join(lines) + "\n"


def merged(old: str, new: str) -> str:
    """The new table, with the old rows of the cases that were not run, in the order of `CASES`."""
    known = [(case.what, case.moment, str(case.num_processes)) for case in CASES]
    heads, rows = new.splitlines()[:2], old.splitlines() + new.splitlines()
    by_case = {tuple(cell.strip() for cell in row.split("|")[1:4]): row for row in rows if row}
    return "\n".join([*heads, *(by_case[case] for case in known if case in by_case)]) + "\n"


def main() -> int:
    """Run the chosen cases; 1 where any outcome is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--short", action="store_true", help="the cases that make test runs")
    parser.add_argument("--write", action="store_true", help="put the rows of these cases into README.md")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in case.name and (case.is_short or not options.short)]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder))
        for number, case in enumerate(chosen, 1):
            outcome = campaign.run(case)
            outcomes.append(outcome)
            result = "ok" if not outcome.failures else "FAILED: " + "; ".join(outcome.failures)
            print(f"{number}/{len(chosen)} {case.name}: {outcome.end_s:.1f} s, {result}", flush=True)
    print(table(outcomes))
    if options.write:
        readme = Path(__file__).parent / "README.md"
        head, old, tail = readme.read_text().split("<!-- table -->")
        readme.write_text(f"{head}<!-- table -->\n{merged(old, table(outcomes))}<!-- table -->{tail}")
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
