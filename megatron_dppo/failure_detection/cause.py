"""Finds the first cause among several reports, and writes the message about it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_dppo.failure_detection.report import Report

_PRECEDENCE = {"raised": 0, "died": 0, "late": 1, "lost": 2, "repeated": 2}
_MAX_STACKS = 6


@dataclass
class Rank:
    """State of a rank, as known to rank 0.

    Attributes:
        number: Rank number.
        host: Name of its host.
        pid: Process id.
        where: Last reported progress.
        since: Time of that progress, on rank 0's monotonic clock.
        end: "failed", "died" or "left" (which is no failure); empty while it runs.
        how: Reason of a rank that left.
        stack: Stack of its main thread, once it has replied.
        silence: Possible reason for a missing reply.
    """

    number: int
    host: str
    pid: int
    where: str = "start-up"
    since: float = field(default_factory=time.monotonic)
    end: str = ""
    how: str = ""
    stack: str = ""
    silence: str = "it does not answer: it is stopped, or blocked"

    def __str__(self) -> str:
        return f"rank {self.number} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class JobFailure:
    """Message and exit code with which the job ends."""

    text: str
    exit_code: int


def first_cause(reports: Sequence[Report]) -> Report:
    """Return the earliest report of the most likely cause: an error or a death, then a time-out.

    If several ranks raise the same error, the lowest rank's report is returned.
    """
    first = min(reports, key=lambda report: _PRECEDENCE[report.kind])
    alike = [report for report in reports if (report.kind, report.summary) == (first.kind, first.summary)]
    return first if first.kind == "died" else min(alike, key=lambda report: report.rank)


def job_failure(reports: Sequence[Report], ranks: Mapping[int, Rank], now: float) -> JobFailure:
    """Write the message about all reports, in order of arrival; `now` is on the clock of `Rank.since`."""
    cause = first_cause(reports)
    rank, others = ranks[cause.rank], [report for report in reports if report.rank != cause.rank]
    if cause.kind == "died":
        text = (
            f"{rank} died in {cause.where}, {cause.for_s:.1f} s after getting there. It reported no error: it "
            "was killed (out of memory?) or crashed; the launcher, or dmesg on that host, may know by what."
        )
    elif cause.kind in ("late", "lost"):
        text = _no_show(cause, others, ranks, now)
    else:
        text = f"{rank} failed in {cause.where}:\n{cause.text}"
    left: dict[str, list[int]] = {}
    for other in ranks.values():
        if other.end == "left":
            left.setdefault(other.how, []).append(other.number)
    before = [f"{_listed(numbers)} had left before, with {how}." for how, numbers in left.items()]
    if cause.kind in ("raised", "repeated", "died"):
        before += _consequences(cause, others)
    return JobFailure("\n".join([*before, text]), cause.exit_code)


def _consequences(cause: Report, others: Sequence[Report]) -> list[str]:
    """Return a line about the ranks that failed like the first one, and a line about later failures."""
    alike = {report.rank for report in others if report.summary == cause.summary or report.kind == "repeated"}
    after = {report.rank for report in others} - alike
    lines = [f"{_listed(alike)} failed like this:"] if alike else []
    return [*lines, f"{_listed(after)} failed after this:"] if after else lines


def _no_show(cause: Report, others: Sequence[Report], ranks: Mapping[int, Rank], now: float) -> str:
    """Describe the ranks that waited in a collective, and the stacks of silent ranks, with the rarest last."""
    silent = [rank for rank in ranks.values() if not rank.end]
    verb = f"waited {cause.waited_s:.1f} s for other ranks" if cause.kind == "late" else "lost other ranks"
    lines = [f"{ranks[cause.rank]} {verb} in {cause.where}:", cause.text]
    waiting: dict[tuple[str, str], list[int]] = {}
    for report in others:
        how = f"waited {report.waited_s:.1f} s" if report.kind == "late" else "failed"
        text = "" if silent else f":\n{report.text}"  # ranks wait for each other: show their stacks
        waiting.setdefault((f"{how} too, in {report.where}", text), []).append(report.rank)
    for (what, text), numbers in list(waiting.items())[:_MAX_STACKS]:
        lines.append(f"{_listed(numbers)} {what}{text}")
    stacks: dict[str, list[Rank]] = {}
    for rank in silent:
        stacks.setdefault(rank.stack, []).append(rank)
    by_size = sorted(stacks.items(), key=lambda group: -len(group[1]))
    if len(by_size) > _MAX_STACKS:
        lines.append(f"{len(by_size) - _MAX_STACKS} more stacks are left out")
    for stack, alike in by_size[-_MAX_STACKS:]:
        rank = max(alike, key=lambda rank: now - rank.since)
        together = f"{_listed(rank.number for rank in alike)} are at one place: " if len(alike) > 1 else ""
        place = f"{together}{rank} did not come: it is in {rank.where} for {now - rank.since:.1f} s"
        lines.append(f"{place}; its main thread:\n{stack}" if stack else f"{place}, and {rank.silence}")
    return "\n".join(lines)


def _listed(ranks: Iterable[int]) -> str:
    """Format rank numbers for a message: "rank 3", or "ranks 0, 2-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
