"""Handles SIGTERM and SIGUSR1: saves a checkpoint and exits with status 75.

The first signal only raises a flag, which the loop reads between gradient steps; sampling, which can take
minutes and leaves no trace before it is complete, is interrupted at once. A second signal ends the process on
the spot: whatever a run writes appears whole or not at all, so nothing is torn.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

EXIT_CODE = 75  # EX_TEMPFAIL: start the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST_S = 1.0  # a launcher forwards what its process group has received already


class Preempted(SystemExit):
    """The run was asked to stop, and has saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class StopRequests:
    """Whether this process was asked to stop. Ranks are asked at different times: they must agree first."""

    def __init__(self) -> None:
        """Use `StopRequests.handled`."""
        self.is_received = False
        self._received_at = 0.0
        self._is_interruptible = False

    @classmethod
    @contextlib.contextmanager
    def handled(cls) -> Iterator["StopRequests"]:
        """Answer the signals while the body runs; in the main thread only."""
        requests = cls()
        before = {number: signal.signal(number, requests._on_signal) for number in _SIGNALS}
        try:
            yield requests
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_unless_asked(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; none where this process was asked to stop before it was done.

        The work must communicate with no other rank, and leave nothing half done that anything reads later.
        """
        try:
            self._is_interruptible = True
            if self.is_received:
                return None
            return work()
        except _Interruption:
            return None
        finally:
            self._is_interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.is_received:
            if now - self._received_at > _SAME_REQUEST_S:
                os._exit(128 + number)
            return
        self.is_received, self._received_at = True, now
        name = signal.Signals(number).name
        # Not through logging: the signal may have come while the main thread was writing a log line.
        os.write(2, f"{name}: saving, then exit {EXIT_CODE}; a second signal ends at once\n".encode())
        if self._is_interruptible:
            self._is_interruptible = False
            raise _Interruption


class _Interruption(BaseException):
    """Unwinds interruptible work; no `except Exception` on the way may keep it."""
