"""Small files: JSON lines and the user's cache, safetensors readable by others, and errors of a full disk.

setup.py imports this module without any other package installed.
"""

import errno
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from megatron_dppo.errors import OF_STORAGE, DataError, DiskError, Problem, ShortageError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]], mode: int = 0o666) -> None:
    """Write one JSON object per line, atomically: readers see the old file or the complete new one."""
    write_whole(path, (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows), mode)


def write_whole(path: Path, parts: Iterable[str], mode: int = 0o666) -> None:
    """Write a text file atomically: readers see the old file or the complete new one.

    Args:
        path: File.
        parts: Its text.
        mode: Its mode before the umask is applied.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk during a write
            error.filename = str(path)
        raise


def make_private(folder: Path) -> None:
    """Create a folder that only its owner may enter, or make it one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def open_private(path: Path) -> BinaryIO:
    """Open a file that only its owner may read, to append bytes."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")
    os.fchmod(file.fileno(), 0o600)  # of an earlier file
    return file


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line number from 1, object) of each line, except blank lines."""
    for number, row in each_line(path):
        if isinstance(row, DataError):
            raise row
        yield number, row


def each_line(
    path: Path, open_file: Callable[..., Any] = Path.open
) -> Iterator[tuple[int, dict[str, object] | DataError]]:
    """Yield (line number from 1, object) of each line that is not blank, or the fault of the line."""
    with open_file(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, _parse(path, number, line)
            except DataError as error:
                yield number, error


def _parse(path: Path, number: int, line: bytes) -> dict[str, object]:
    where = f"{path}, line {number}"
    expected = "one JSON object per line"
    excerpt = line.decode("utf-8", errors="replace").strip()
    excerpt = excerpt if len(excerpt) <= 60 else excerpt[:60] + "..."
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found, action = f"bytes that are not UTF-8 ({excerpt!r})", "Write the file again, as UTF-8."
        raise DataError(Problem(where, found, expected, action)) from error
    except ValueError as error:
        action = "Write the file again; a last line like this comes from a write that was cut off."
        raise DataError(Problem(where, f"{excerpt!r} ({error})", expected, action)) from error
    if not isinstance(value, dict):
        found = f"a JSON {type(cast(object, value)).__name__}"
        raise DataError(Problem(where, found, expected, "Put the row's fields into an object."))
    return cast(dict[str, object], value)


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/megatron_dppo, by default under ~/.cache; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "megatron_dppo"


def write_json(path: Path, content: Any) -> None:
    """Write `content` to the cache, completely or not at all; a failure to write is ignored."""
    with suppress(OSError):
        write_whole(path, [json.dumps(content)])


@contextmanager
def full_disk_explained(*folders: Path, kept: Callable[[], str] = str) -> Iterator[None]:
    """Replace errors of a full or failing disk in the body, whichever library raised them, by one line.

    Args:
        folders: Folders that the body writes to. The message names the one with the least free space or,
            without folders, the file in the error.
        kept: Function that returns a sentence on the data that is kept, such as "The newest checkpoint is X. ".
    """
    try:
        yield
    except Exception as error:  # safetensors has another class, which setup.py cannot import
        if isinstance(error, OSError) and error.errno in OF_THIS_MACHINE:
            raise ShortageError(
                f"this machine: found {error.strerror} at {error.filename or 'a call'}; expected to open one. "
                f"{kept()}{_RAISE_LIMITS}"
            ) from error
        if isinstance(error, OSError) and error.errno in {*OF_STORAGE, errno.EROFS}:
            where = error.filename or next(iter(folders), "a file")
            raise StorageError(
                f"{where}: found {error.strerror}; expected its disk, mount or file server to respond. {kept()}"
                "Look at the disk, and start the same command again."
            ) from error
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


ABSENT = (FileNotFoundError, NotADirectoryError)
"""A file that is not there, which no further attempt finds."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to read from a file server that fails for a moment."""


def read_patiently(path: Path, read: Callable[[], T], pauses_s: Sequence[float] = PAUSES_S) -> T:
    """Return the result of `read`, which is called again after an error of the system.

    That a file is absent is no such error: one of `ABSENT` is raised at once.

    Args:
        path: File or folder that is read, for the message.
        read: Reads it.
        pauses_s: Seconds before each further attempt.
    """
    for pause_s in (*pauses_s, None):
        try:
            return read()
        except ABSENT:
            raise
        except OSError as error:
            if pause_s is None:
                raise unreadable(path, error) from error
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if there is no such folder."""
    try:
        return read_patiently(folder, lambda: list(folder.iterdir()))
    except ABSENT:
        return []


def unreadable(path: Path, error: OSError) -> StorageError:
    """Return the error for a file or folder that the system cannot read."""
    where = error.filename if isinstance(error.filename, str) else path
    if error.errno in OF_THIS_MACHINE:
        return StorageError(
            f"{where}: found that it cannot be opened ({error.strerror}); expected that this machine has a "
            f"further open file. Nothing was changed. {_RAISE_LIMITS}"
        )
    return StorageError(
        f"{where}: found that it cannot be read ({error.strerror or error}); expected its disk, mount or file "
        "server to respond. Nothing was changed. Look at the disk, and start the same command again."
    )


def require_reachable(path: Path) -> None:
    """Refuse a path that is a link to nothing, as to a disk that is not mounted."""
    for place in (path, *path.parents):
        if read_patiently(place, place.is_symlink) and not read_patiently(place, place.exists):
            target = place.readlink()
            raise StorageError(
                f"{place}: found a link to {target}, which is not there; expected a folder. Mount its disk, or "
                "remove the link, and start the same command again."
            )


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


def binary_count(num_bytes: float) -> str:
    """Return a count of bytes in GiB, MiB or KiB, the largest that leaves at least one: "754 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes / 1024:.3g} KiB"


OF_THIS_MACHINE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)
"""Error numbers that say what this machine has too little of."""
_RAISE_LIMITS = (
    "Raise its limits of open files and processes (ulimit -n, -u), and start the same command again."
)
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


def save_tensors(
    tensors: "Mapping[str, Tensor]", path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode that a new file has in its folder, not safetensors' 0600."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] - needs PyTorch

    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(_mode_of_a_new_file(path.parent))


def make_readable(folder: Path) -> None:
    """Set the mode of a new file on the safetensors files that a library wrote into a folder."""
    mode = _mode_of_a_new_file(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _mode_of_a_new_file(folder: Path) -> int:
    """Return the mode of a temporary new file: reading the umask would set it, for all threads."""
    file = folder / f".{uuid.uuid4().hex}.mode"
    file.touch(exist_ok=False)
    try:
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink()
