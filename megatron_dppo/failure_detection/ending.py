"""Ends this process from any of its threads, whatever the main thread is blocked in."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_WRITE_TIMEOUT_S = 2.0
_ending = threading.Lock()  # taken by the thread that ends the process: another would cut its last words off


def leave_at_once(exit_code: int) -> NoReturn:
    """End without a word of our own."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    os._exit(exit_code)


def leave_with(text: str, exit_code: int) -> NoReturn:
    """End with `text` as the last thing that this process writes to stderr."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # other threads still run, and may log
        os.dup2(nowhere, stream)
    _try_for(_WRITE_TIMEOUT_S, lambda: _write(stderr, f"\n{text.rstrip()}\n".encode()))
    os._exit(exit_code)


def state_of(pid: int) -> str:
    """The state of a process of this machine as /proc has it, "T" where it is stopped; empty if not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill(pid: int) -> None:
    """End a process of this machine that does not listen."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _try_for(timeout_s: float, action: Callable[[], None]) -> None:
    """Do it if it does not take long: a full pipe, or a lock that the main thread holds, must not keep us."""
    attempt = threading.Thread(target=action, daemon=True)
    attempt.start()
    attempt.join(timeout_s)
