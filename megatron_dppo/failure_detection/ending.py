"""Ends this process from any of its threads, whatever blocks the main thread."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_WRITE_TIMEOUT_S = 2.0
_ending = (
    threading.Lock()
)  # held by the thread that ends the process, so that no other thread cuts off its message


def leave_at_once(exit_code: int) -> NoReturn:
    """End this process without a message."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    os._exit(exit_code)


def leave_with(text: str, exit_code: int) -> NoReturn:
    """End this process with `text` as the last output on stderr."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # other threads still run, and may log
        os.dup2(nowhere, stream)
    _try_for(_WRITE_TIMEOUT_S, lambda: _write(stderr, f"\n{text.rstrip()}\n".encode()))
    os._exit(exit_code)


def state_of(pid: int) -> str:
    """Return the state of a local process from /proc, such as "T" if it is stopped; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill(pid: int) -> None:
    """Kill a local process that does not respond."""
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
    """Run an action with a time limit: a full pipe, or a lock of the main thread, must not block the exit."""
    attempt = threading.Thread(target=action, daemon=True)
    attempt.start()
    attempt.join(timeout_s)
