"""Handles SIGTERM and SIGUSR1: saves a checkpoint and exits with status 75.

The first signal only raises a flag, which the loop reads between gradient steps; sampling, which can take
minutes and leaves no trace before it is complete, is interrupted at once. A second signal ends the process on
the spot: whatever a run writes appears whole or not at all, so nothing is torn.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from megatron_dppo.runtime.process import Runtime

T = TypeVar("T")

_logger = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL: start the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_REQUEST_S = 1.0  # a launcher forwards what its process group has received already


class Preempted(SystemExit):
    """Exit of a run that was asked to stop, and has saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class StopRequests:
    """Records whether this process was asked to stop. Ranks are asked at different times: they must agree."""

    def __init__(self) -> None:
        """Start without signal handlers; `handled` installs them."""
        self.is_received = False
        self._received_at = 0.0
        self._is_interruptible = self._is_interrupted = False

    @contextlib.contextmanager
    def handled(self) -> Iterator["StopRequests"]:
        """Handle the signals while the body runs; in the main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_unless_asked(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; none where this process was asked to stop before it was done.

        The work must communicate with no other rank, and leave nothing half done that anything reads later. It
        may run an event loop, whose tasks are cancelled.
        """
        try:
            self._is_interruptible = True
            if self.is_received:
                return None
            return work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if not self._is_interrupted:
                raise
            if not isinstance(error, _Interruption):  # an event loop groups it, or fails to clean up after it
                _logger.info("the request to stop ended sampling; on its way out it became %r", error)
            return None
        finally:
            self._is_interruptible = self._is_interrupted = False

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
            self._is_interruptible, self._is_interrupted = False, True
            _cancel_tasks()
            raise _Interruption


class Preemption:
    """Saves and ends the run where any rank was asked to stop. Every rank calls each method, together."""

    def __init__(self, requests: StopRequests, runtime: Runtime, save: Callable[[], None]) -> None:
        """Keep `save`, which writes a checkpoint and returns once it is on disk."""
        self._requests, self._runtime, self._save = requests, runtime, save

    def exit_if_requested(self) -> None:
        """End the run where any rank was asked to stop.

        Raises:
            Preempted: The run has saved.
        """
        if self._runtime.any(self._requests.is_received):
            self._save_and_exit()

    def run_interruptible(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; leave it at once, and end the run, where any rank is asked to stop.

        Args:
            work: Samples: it communicates with no other rank, and is done again after a resume.

        Raises:
            Preempted: The run has saved.
        """
        result = self._requests.run_unless_asked(work)
        if self._runtime.any(result is None):
            self._save_and_exit()
        assert result is not None, "only a request to stop leaves the work undone"
        return result

    def run_together(self, work: Callable[[Callable[[], bool]], T | None]) -> T:
        """Return what `work` returns; end the run where it returns none, which it does on all ranks.

        Args:
            work: Waits together with the other ranks, and stops waiting where any of them was asked to stop,
                which its argument says of this one.

        Raises:
            Preempted: The run has saved.
        """
        result = work(lambda: self._requests.is_received)
        if result is None:
            self._save_and_exit()
        assert result is not None, "the run has ended else"
        return result

    def _save_and_exit(self) -> None:
        self._save()
        raise Preempted


class _Interruption(BaseException):
    """Unwinds interruptible work; no `except Exception` on the way may keep it."""


def _cancel_tasks() -> None:
    """Let the event loop that runs here, if one does, cancel its tasks: a callback's exceptions end nothing."""
    with contextlib.suppress(RuntimeError):  # there is none
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
