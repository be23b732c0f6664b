"""Handles SIGTERM, SIGUSR1, Ctrl-C and a closed terminal: saves a checkpoint and exits with status 75.

The first signal only sets a flag, which the loop reads between gradient steps. Sampling is interrupted at once,
because it can take minutes and writes nothing before it is complete, and so is the start of a run, which has
nothing to save. A second signal ends the process immediately. A run writes all files atomically, so nothing is
torn.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import TypeVar

from megatron_dppo.rollout.scheduling import RunUnlessAsked
from megatron_dppo.runtime.process import Runtime

T = TypeVar("T")

_logger = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL: start the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # ignored if they were at the start: nohup, or & in a script
_SAME_REQUEST_S = 1.0  # a launcher forwards signals that its process group has already received


class Preempted(SystemExit):
    """Exit of a run that has received a stop signal, and has saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class StopRequests:
    """Records whether this process has received a stop signal. Ranks receive it at different times."""

    def __init__(self, *, has_begun: bool = True) -> None:
        """Start without signal handlers; `handle_signals` installs them. `has_begun`: see `begin`."""
        self.is_received, self._has_begun = False, has_begun
        self._received_at = 0.0
        self._is_interruptible = self._is_interrupted = False

    @contextlib.contextmanager
    def handle_signals(self) -> Generator["StopRequests"]:
        """Handle the signals while the body runs; only in the main thread."""
        ignored = {number for number in _OF_TERMINALS if signal.getsignal(number) is signal.SIG_IGN}
        handled = [number for number in _SIGNALS if number not in ignored]
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin(self) -> None:
        """Let the next signal wait for the loop, which saves: the run is loaded."""
        self._has_begun = True

    def run_unless_asked(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`; None if this process received a stop signal before `work` was done.

        `work` must not communicate with other ranks, and must not leave partial results that are read later. It
        may run an event loop. A stop signal cancels the loop's tasks.
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
                _logger.info("the stop signal ended sampling, with %r", error)
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
        if not self._has_begun:
            _say(f"{name}: exit {EXIT_CODE} before training has begun")
            raise Preempted
        _say(f"{name}: saving, then exit {EXIT_CODE}; a second signal ends at once")
        if self._is_interruptible:
            self._is_interruptible, self._is_interrupted = False, True
            _cancel_tasks()
            raise _Interruption


class Preemption:
    """Saves and ends the run if any rank has received a stop signal. All ranks call each method together."""

    def __init__(self, requests: StopRequests, runtime: Runtime, save: Callable[[], None]) -> None:
        """Store `save`, which writes a checkpoint and returns once it is on disk."""
        self._requests, self._runtime, self._save = requests, runtime, save

    def exit_if_requested(self) -> None:
        """End the run if any rank has received a stop signal."""
        if self._runtime.any(self._requests.is_received):
            self._save_and_exit()

    def run_interruptible(self, work: Callable[[], T]) -> T:
        """Return the result of `work`; interrupt it and end the run if any rank receives a stop signal.

        Args:
            work: Function that samples, without communicating with other ranks. A resume repeats it.
        """
        result = self._requests.run_unless_asked(work)
        if self._runtime.any(result is None):
            self._save_and_exit()
        assert result is not None, "only a request to stop leaves the work undone"
        return result

    def run_together(self, work: Callable[[RunUnlessAsked], T | None]) -> T:
        """Return the result of `work`; end the run if the result is None, which must be so on all ranks.

        Args:
            work: Function that samples or waits together with the other ranks, until any of them has received
                a stop signal. Its argument is `StopRequests.run_unless_asked` of this rank.
        """
        result = work(self._requests.run_unless_asked)
        if result is None:
            self._save_and_exit()
        assert result is not None, "the run has ended else"
        return result

    def _save_and_exit(self) -> None:
        self._save()
        raise Preempted


class _Interruption(BaseException):
    """Unwinds interruptible work; a BaseException, so that no `except Exception` catches it."""


def _say(line: str) -> None:
    """Write a line, not through logging: the main thread may be writing a log line itself."""
    with contextlib.suppress(OSError):  # the terminal, or the program behind the pipe, has ended too
        os.write(2, f"{line}\n".encode())


def _cancel_tasks() -> None:
    """Cancel the tasks of the running event loop, if any, because a callback's exception would not end it."""
    with contextlib.suppress(RuntimeError):  # no loop is running
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
