"""Ends a computation after some seconds of its thread's processor time, in any thread.

Processor time gives the same result on a busy machine as on an idle one. In the main thread a signal ends the
computation. Python delivers signals only there, so in other threads a watcher raises the exception.
"""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

_Result = TypeVar("_Result")
_AGAIN_AFTER_S = 0.1


class OutOfTimeError(BaseException):
    """The time is over. It is not an `Exception`, so that libraries do not catch it."""


def within(seconds: float, compute: Callable[[], _Result]) -> _Result:
    """Return the result of a function.

    Raises:
        OutOfTimeError: The function used more processor time than the limit.
    """
    if threading.current_thread() is threading.main_thread():
        return _by_signal(seconds, compute)
    return _by_watcher(seconds, compute)


def _by_signal(seconds: float, compute: Callable[[], _Result]) -> _Result:
    is_computing = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_computing:
            raise OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_AFTER_S)
    try:
        return compute()
    finally:
        is_computing = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def _by_watcher(seconds: float, compute: Callable[[], _Result]) -> _Result:
    is_over = threading.Event()
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not is_over.wait(_AGAIN_AFTER_S):
            if time.clock_gettime(clock) > end:
                _raise_in(thread, OutOfTimeError)

    watcher = threading.Thread(target=watch, name="time limit", daemon=True)
    watcher.start()
    try:
        return compute()
    finally:
        while watcher.is_alive():
            try:
                is_over.set()
                watcher.join()
            except OutOfTimeError:  # raised after the result was computed
                continue
        _raise_in(thread, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an exception at its next step. `None` cancels an exception not yet raised."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
