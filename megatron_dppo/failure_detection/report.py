"""Describes one rank's failure as a message: its place, its error, and whether another rank caused it."""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from megatron_dppo.errors import MegatronDppoError
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


@dataclass(frozen=True)
class Report:
    """End of one rank.

    Attributes:
        rank: Rank number.
        kind: "raised" an exception itself; "died" without a report; "late", timed out waiting for others in a
            collective; "lost" others in a collective; or "repeated" an exception of rank 0.
        is_user_error: Whether the message is complete without a traceback.
        summary: Exception in one line.
        text: Traceback, or message for users; empty for a death.
        where: Progress of the rank.
        for_s: Seconds since that progress.
    """

    rank: int
    kind: str
    is_user_error: bool
    summary: str
    text: str
    where: str
    for_s: float

    @classmethod
    def of(cls, error: BaseException, runtime: Runtime) -> "Report":
        """Build this rank's report of the current exception."""
        progress = runtime.progress
        is_user_error = isinstance(error, MegatronDppoError)
        message = f"{type(error).__name__}: {error}".strip()
        text = message if is_user_error else "".join(_formatted(error)).strip()
        return cls(
            rank=runtime.rank,
            kind=_kind(error),
            is_user_error=is_user_error,
            summary=message.splitlines()[0][:500],
            text=text
            if len(text) <= _MAX_TEXT
            else f"{text[: _MAX_TEXT // 2]}\n...\n{text[-_MAX_TEXT // 2 :]}",
            where=progress.describe(),
            for_s=time.monotonic() - progress.since,
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the job if this was the first cause."""
        return 2 if self.is_user_error else 1

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


def _formatted(error: BaseException) -> list[str]:
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
