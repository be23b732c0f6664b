"""Detects errors of a full disk, and explains them in one line."""

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from megatron_dppo.errors import DiskError


@contextmanager
def full_disk_explained(*folders: Path, kept: Callable[[], str] = str) -> Iterator[None]:
    """Replace errors of a full disk in the body, whichever library raised them, by an error of one line.

    Args:
        folders: Folders that the body writes to. The message names the one with the least free space or,
            without folders, the file in the error.
        kept: Function that returns a sentence on the data that is kept, such as "The newest checkpoint is X. ".

    Raises:
        DiskError: A file could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not is_full_disk(error):
            raise
        named = getattr(error, "filename", None)
        places = folders or ((Path(named),) if isinstance(named, str) else ())
        where = min(places, key=free_bytes, default=None)
        start = "" if where is None else f"{where}: "
        free = "" if where is None else f", with {free_bytes(where)} bytes free on its disk"
        raise DiskError(
            f"{start}found that a file cannot be written ({str(error).splitlines()[0]}){free}; expected room "
            f"for it. {kept()}Free some space, and start the same command again."
        ) from error


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a file or folder, which may not exist yet."""
    path = path.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def byte_count(num_bytes: int) -> str:
    """Return a count of bytes in the largest unit that leaves at least one: "512 B", "3.20 MB", "61.08 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Error texts of libraries in C++ and Rust for the operating system's error; torch keeps no error number.
_FULL_TEXT = re.compile(
    rf"os error ({'|'.join(map(str, _FULL))})\)|iostream error|inline_container|PytorchStreamWriter"
)


def is_full_disk(error: Exception) -> bool:
    """Whether a library raised this error because the disk or a quota is full, or a file is too large."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return _FULL_TEXT.search(str(error)) is not None
