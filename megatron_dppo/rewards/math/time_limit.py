"""Ends a computation after some seconds of its thread's processor time, in any thread.

A busy machine then decides as an idle one does. In the main thread a signal ends it. Python delivers signals
nowhere else, so in another thread a watcher raises the exception.
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
    """The time is over. No `except Exception` of a library may stop it."""


def within(seconds: float, compute: Callable[[], _Result]) -> _Result:
    """Return what a function computes.

    Raises:
        OutOfTimeError: After so many seconds of the processor.
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
            except OutOfTimeError:  # it came while the result was on its way
                continue
        _raise_in(thread, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an exception at its next step; none takes back one that it has not raised yet."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
