"""Describes one rank's failure as a message: its place, its error, and whether another rank caused it."""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch.distributed as dist

from megatron_dppo.errors import MegatronDppoError, exit_status
from megatron_dppo.runtime.process import RaisedOnMain, Runtime

_MAX_TEXT = 60_000
# Error texts of gloo, the store and NCCL if another rank is gone, or late. Both are RuntimeErrors.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
    "Application timeout caused pair closure",
    "ncclRemoteError",
    "communicator was aborted",
)
_LATE = (
    "Timed out waiting",
    "Timed out after",
    "wait timeout after",
    "failed to pass monitoredBarrier",
    "collective operation timeout",
)
_PRECEDENCE = {
    "raised": 0,
    "died": 0,
    "unreachable": 0,
    "silent": 0,
    "garbled": 0,
    "late": 1,
    "lost": 2,
    "repeated": 2,
}
_MAX_STACKS = 6


@dataclass(frozen=True)
class End:
    """How a rank's connection ended, in words: a verb, and where to look."""

    verb: str
    advice: str


LOST = {
    "died": End(
        "died",
        "It reported no error: it was killed (out of memory?) or crashed, or its host was restarted; the "
        "launcher, or dmesg on that host, may know by what.",
    ),
    "unreachable": End(
        "cannot be reached",
        "Its host is off or hangs, or the network is down between the hosts; its process may live.",
    ),
    "silent": End(
        "is silent",
        "Its host responds, but not its process: it is stopped (by SIGSTOP, or a debugger), one call holds "
        "Python's lock, or its host hangs. If it was only slow, raise run.peer_timeout_s.",
    ),
    "garbled": End("sent what no rank sends", "Memory or network is broken, or its package is another one."),
}
"""Ends by the kind of a report that rank 0 makes for a rank."""


@dataclass(frozen=True)
class Report:
    """End of one rank.

    Attributes:
        rank: Rank number.
        kind: "raised" an exception itself; a kind of `LOST`, without a report; "late", timed out
            waiting for others in a collective; "lost" others in a collective; or "repeated" an exception of
            rank 0.
        exit_code: Exit code of the job if this was the first cause.
        summary: Exception in one line.
        text: Traceback, or message for users; of a lost rank, what the system reported.
        where: Progress of the rank.
        for_s: Seconds since that progress.
    """

    rank: int
    kind: str
    exit_code: int
    summary: str
    text: str
    where: str
    for_s: float

    @classmethod
    def of(cls, error: BaseException, runtime: Runtime) -> "Report":
        """Build this rank's report of the current exception."""
        progress = runtime.progress
        message = f"{type(error).__name__}: {error}".strip()
        is_complete = isinstance(error, MegatronDppoError)
        text = message if is_complete else "".join(_format_traceback(error)).strip()
        return cls(
            rank=runtime.rank,
            kind=_kind(error),
            exit_code=exit_status(error),
            summary=message.splitlines()[0][:500],
            text=text
            if len(text) <= _MAX_TEXT
            else f"{text[: _MAX_TEXT // 2]}\n...\n{text[-_MAX_TEXT // 2 :]}",
            where=progress.describe(),
            for_s=time.monotonic() - progress.since,
        )

    @property
    def waited_s(self) -> float:
        """Seconds that the rank waited for others."""
        match = re.search(r"(?:waiting|timeout after|in|after) (\d+) ?ms", self.summary)
        return int(match[1]) / 1000 if match else self.for_s


def main_thread_stack() -> str:
    """Return the stack of this process's main thread as a traceback, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame else ""


def record_for_torchrun(error: BaseException) -> None:
    """Record the current exception for torchrun's summary."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):  # a full disk must not prevent the report
            get_error_handler().record_exception(error)


@dataclass
class Rank:
    """State of a rank, as known to rank 0.

    Attributes:
        number: Rank number.
        host: Host name.
        pid: Process id.
        where: Last reported progress.
        since: Time of that progress, on rank 0's monotonic clock.
        end: "failed", "left" (which is no failure), or a kind of `LOST`; empty while it runs.
        how: Reason of a rank that left.
        stack: Main thread's stack, once the rank has replied.
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
    silence: str = "it does not reply: it is stopped, or blocked"

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
    return first if first.kind in LOST else min(alike, key=lambda report: report.rank)


def job_failure(reports: Sequence[Report], ranks: Mapping[int, Rank], now: float) -> JobFailure:
    """Write the message about all reports, in order of arrival; `now` is on the clock of `Rank.since`."""
    cause = first_cause(reports)
    rank, others = ranks[cause.rank], [report for report in reports if report.rank != cause.rank]
    if cause.kind in LOST:
        end = LOST[cause.kind]
        text = (
            f"{rank} {end.verb} in {cause.where}, {cause.for_s:.1f} s after getting there ({cause.text}). "
            f"{end.advice}{_hosts_in_reach(reports, ranks)}"
        )
    elif cause.kind in ("late", "lost"):
        text = _no_show(cause, others, ranks, now)
    else:
        text = f"{rank} failed in {cause.where}:\n{cause.text}"
    left: dict[str, list[int]] = {}
    for other in ranks.values():
        if other.end == "left":
            left.setdefault(other.how, []).append(other.number)
    before = [f"{_list_ranks(numbers)} had left before, with {how}." for how, numbers in left.items()]
    if cause.kind in ("raised", "repeated", *LOST):
        before += _consequences(cause, others)
    return JobFailure("\n".join([*before, text]), cause.exit_code)


def _format_traceback(error: BaseException) -> list[str]:
    """Format the traceback, without the frame of `watching` itself."""
    trace: TracebackType | None = error.__traceback__
    return traceback.format_exception(type(error), error, trace.tb_next if trace else None)


def _kind(error: BaseException) -> str:
    origin = _origin(error)
    if isinstance(origin, RaisedOnMain):
        return "repeated"
    if type(origin) is RuntimeError or isinstance(origin, dist.DistError):
        message = str(origin)
        if any(sign in message for sign in _LOST):
            return "lost"
        if any(sign in message for sign in _LATE):
            return "late"
    return "raised"


def _origin(error: BaseException) -> BaseException:
    """Return the exception at the root of `error`'s chain of causes and contexts."""
    seen = {id(error)}
    while (deeper := error.__cause__ or error.__context__) is not None and id(deeper) not in seen:
        seen.add(id(deeper))
        error = deeper
    return error


def _consequences(cause: Report, others: Sequence[Report]) -> list[str]:
    """Return a line about the ranks that failed like the first one, and a line about later failures."""
    alike = {report.rank for report in others if report.summary == cause.summary or report.kind == "repeated"}
    after = {report.rank for report in others} - alike
    lines = [f"{_list_ranks(alike)} failed like this:"] if alike else []
    return [*lines, f"{_list_ranks(after)} failed after this:"] if after else lines


def _hosts_in_reach(reports: Sequence[Report], ranks: Mapping[int, Rank]) -> str:
    """Return a sentence on the other hosts, if one of several is out of reach: is it the host, or this one?"""
    lost = {ranks[report.rank].host for report in reports if report.kind == "unreachable"}
    others = {rank.host for rank in ranks.values()} - {ranks[0].host}
    if not lost or len(others) < 2:
        return ""
    if lost == others:
        return f" No other host can be reached: look at this host ({ranks[0].host}) and its network first."
    return f" Hosts that can be reached: {', '.join(sorted(others - lost))}."


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
        lines.append(f"{_list_ranks(numbers)} {what}{text}")
    stacks: dict[str, list[Rank]] = {}
    for rank in silent:
        stacks.setdefault(rank.stack, []).append(rank)
    by_size = sorted(stacks.items(), key=lambda group: -len(group[1]))
    if len(by_size) > _MAX_STACKS:
        lines.append(f"{len(by_size) - _MAX_STACKS} more stacks are left out")
    for stack, alike in by_size[-_MAX_STACKS:]:
        rank = max(alike, key=lambda rank: now - rank.since)
        together = f"{_list_ranks(rank.number for rank in alike)} are at one place: " if len(alike) > 1 else ""
        place = f"{together}{rank} did not come: it is in {rank.where} for {now - rank.since:.1f} s"
        lines.append(f"{place}; its main thread:\n{stack}" if stack else f"{place}, and {rank.silence}")
    return "\n".join(lines)


def _list_ranks(ranks: Iterable[int]) -> str:
    """Format rank numbers for a message: "rank 3", or "ranks 0, 2-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"
