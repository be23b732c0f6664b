"""Rewrites the report while its runs go on, and ends with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_dppo.analysis.report.report import compare
from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.lock import is_in_use
from megatron_dppo.run_folder.reader import Run, read_run

MOST_FAULTS = 3  # in a row: a file that is just being replaced reads as damaged for a moment


def watch(
    runs: Sequence[Path],
    out: Path,
    every_s: float,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
    tokens_at: int | None = None,
) -> list[str]:
    """Rewrite the report when a run has written, until all have ended or the user interrupts.

    The page reloads itself meanwhile; the last one written does not.

    Args:
        runs: Run folders.
        out: The report.
        every_s: Seconds between two looks.
        say: Gets a sentence for each report written, and one on the end.
        wait: Waits so many seconds.
        tokens_at: See `compare`.

    Returns:
        The findings of the last report.

    Raises:
        ConfigError: See `compare`.
        DataError: A folder is no run's, or stays unreadable.
    """
    seen: list[int] = []
    faults = 0
    try:
        while True:
            try:
                files = (path / "metrics.jsonl" for path in runs)
                sizes = [file.stat().st_size for file in files if file.is_file()]
                going = [path for path in runs if is_going(read_run(path))]
                if not going:
                    say("all runs have ended")
                    break
                if sizes != seen:
                    compare(runs, out, every_s, tokens_at)
                    say(f"wrote {out}: {progress(runs)}")
                seen, faults = sizes, 0
            except DataError:
                faults += 1
                if not seen or faults == MOST_FAULTS:
                    raise
            wait(every_s)
    except KeyboardInterrupt:
        say("stopped watching; the runs go on")
    return compare(runs, out, tokens_at=tokens_at)


def is_going(run: Run) -> bool:
    """Return whether more rows may come: rollouts are left, and the process is not known to have ended."""
    planned = run.option("run.num_rollouts")
    if isinstance(planned, int) and len(run.rollouts) >= planned:
        return False
    return is_in_use(run.path) is not False


def progress(runs: Sequence[Path]) -> str:
    """Return the rollouts done and planned, run by run."""
    read = [read_run(path) for path in runs]
    return ", ".join(f"{run.name} {len(run.rollouts)}/{run.option('run.num_rollouts') or '?'}" for run in read)
