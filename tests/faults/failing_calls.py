"""Lets the n-th call of the operating system below a folder fail, in this process, once or from then on."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Calls that Python reports before it makes them; what a hook raises then is raised in place of the call.
_REPORTED = {
    *("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.truncate"),
    *("os.link", "os.symlink", "os.chmod", "os.utime"),
}
_WRAPPED = ("stat", "lstat", "fsync")
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EMFILE, errno.ENOTEMPTY)


@dataclass
class FailingCalls:
    """Counts calls below a folder, and fails those from `first` on.

    Attributes:
        folder: Calls with a path below it, or with an open file below it, count.
        first: Number of the first call that fails, from 0; None fails none.
        number: Error number of the failing calls.
        lasts: Whether the later calls fail too.
        thread: Only calls of threads with this name count; "" is all threads.
        calls: Names of the calls, in order.
    """

    folder: Path
    first: int | None = None
    number: int = errno.EIO
    lasts: bool = False
    thread: str = ""
    calls: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, name: str, place: Any) -> None:
        """Count a call, or raise OSError in its place."""
        if self.thread not in ("", threading.current_thread().name):
            return
        if isinstance(place, int):
            try:
                place = Path(f"/proc/self/fd/{place}").readlink()
            except OSError:
                return
        if not isinstance(place, (str, os.PathLike)) or not str(place).startswith(str(self.folder)):
            return
        with self._lock:
            position = len(self.calls)
            self.calls.append(name)
        if self.first is not None and (position >= self.first if self.lasts else position == self.first):
            raise OSError(self.number, os.strerror(self.number), str(place))


_active: FailingCalls | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (active := _active) is not None and event in _REPORTED:
        active.meet(event, arguments[0])


def _wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(place: Any, *arguments: Any, **options: Any) -> Any:
        if (active := _active) is not None:
            active.meet(f"os.{name}", place)
        return call(place, *arguments, **options)

    return wrapper


def install() -> None:
    """Prepare this process. Use a separate process, as Python cannot remove such a hook."""
    sys.addaudithook(_hook)
    for name in _WRAPPED:
        setattr(os, name, _wrapped(name, getattr(os, name)))


def begin(calls: FailingCalls | None) -> None:
    """Count calls, and let them fail, from now on; None: none."""
    global _active
    _active = calls


@contextmanager
def failing(calls: FailingCalls | None) -> Iterator[None]:
    """Count calls, and let them fail, in the body. None: none, as if another machine made them."""
    before = _active
    begin(calls)
    try:
        yield
    finally:
        begin(before)
