"""Waiting for other processes, whether one is there, and what a hanging one does."""

import time
from collections.abc import Callable
from typing import NoReturn

import psutil


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s} s"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def hang(*_: object) -> NoReturn:
    """Never return."""
    while True:
        time.sleep(600)
