"""Locks a run folder to one process; a lock whose owner has died is taken over.

The operating system's lock (flock) tells the truth within a host, and ends with its process however that ends.
Across hosts it may not reach, so the owner also rewrites the file every few seconds: an owner elsewhere that
has stopped doing so is gone.

The library `filelock` does not give both. Its FileLock is flock alone, and fails where a file system has no
locks; its SoftFileLease is the signs of life alone, and takes a folder from a process of this host that is only
stopped.
"""

import contextlib
import fcntl
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dppo.errors import ConfigError, Problem, writing_to

logger = logging.getLogger(__name__)

LOCK = "run.lock"


@contextlib.contextmanager
def locked(folder: Path, beat_s: float = 5.0, key: str = "run.folder") -> Iterator[None]:
    """Lock the run folder for the time of the body.

    Args:
        folder: The run's; made if it is not there.
        beat_s: Seconds between signs of life. An owner on another host is believed gone after three without.
        key: What named the folder, for the message.

    Raises:
        ConfigError: Another process holds it, and the message says which; or it cannot be written.
    """
    with writing_to(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        is_free = _lock(stream)
        owner = _read(folder)
        is_known = is_free is not None and owner.get("host") == socket.gethostname()
        if is_free is False or (owner and not is_known and _is_alive(folder, beat_s)):
            raise ConfigError(_in_use(folder, key, _read(folder)))
        if owner:
            logger.warning("%s: taking over from %s, which ended without releasing it", folder, _words(owner))
        me = _this_process()
        _write(stream, me)
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(stream, me, ended, beat_s), daemon=True, name="run lock")
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            stream.truncate(0)  # an empty file is a free folder; removing it would race with the next owner


def holder(folder: Path, beat_s: float = 5.0) -> str | None:
    """Return the process that holds the run folder, in words; None if the folder is free.

    Args:
        folder: The run's.
        beat_s: As in `locked`. An owner on another host is watched for three times as long.
    """
    owner = _read(folder)
    if not owner:
        return None
    is_here = owner.get("host") == socket.gethostname()
    try:
        with (folder / LOCK).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _words(owner)
    except OSError:
        is_here = False  # the file system has no locks
    return None if is_here or not _is_alive(folder, beat_s) else _words(owner)


def is_in_use(folder: Path, silent_s: float = 60.0) -> bool | None:
    """Return whether a process holds the run folder, without a lock of one's own.

    Args:
        folder: The run's.
        silent_s: Seconds without a sign of life after which the owner is believed gone.

    Returns:
        None where there is no lock file: no process of this version has held the folder.
    """
    try:
        status = (folder / LOCK).stat()
    except OSError:
        return None
    return status.st_size > 0 and time.time() - status.st_mtime < silent_s


def _lock(stream: BinaryIO) -> bool | None:
    """Try to take the lock; return whether it is ours now, none where the file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "%s: the file system has no locks (%s); trusting signs of life alone", stream.name, error
        )
        return None
    return True


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "beat": 0,
    }


def _beat(stream: BinaryIO, owner: dict[str, Any], ended: threading.Event, beat_s: float) -> None:
    while not ended.wait(beat_s):
        owner["beat"] += 1
        _write(stream, owner)


def _write(stream: BinaryIO, owner: dict[str, Any]) -> None:
    """Overwrite the file in one write: the file of a folder in use is never empty."""
    with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, with a better message
        stream.seek(0)
        stream.write(json.dumps(owner).encode() + b"\n")
        stream.truncate()


def _read(folder: Path) -> dict[str, Any]:
    """Read the owner's entry; empty where the folder is free, or the owner is just writing."""
    try:
        owner: Any = json.loads((folder / LOCK).read_text())
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError):
        return {}


def _is_alive(folder: Path, beat_s: float) -> bool:
    """Whether the owner is alive, on a host that locks may not reach."""
    before = _read(folder).get("beat")
    logger.info(
        "%s: an owner is named that a lock may not reach; waiting %.0f s for a sign of life", folder, 3 * beat_s
    )
    deadline = time.monotonic() + 3 * beat_s
    while time.monotonic() < deadline:
        time.sleep(beat_s / 4)
        beat = _read(folder).get("beat")
        if beat is not None and beat != before:
            return True
    return False


def _words(owner: dict[str, Any]) -> str:
    pid, host, since = (owner.get(key, "?") for key in ("pid", "host", "since"))
    return f"process {pid} on {host} (since {since}: {owner.get('command', '?')})"


def _in_use(folder: Path, key: str, owner: dict[str, Any]) -> Problem:
    who = _words(owner) if owner else "another process"
    return Problem(
        key,
        f"{folder}, in use by {who}",
        "a folder that no other run is using",
        f"Wait for that run or end it, or choose another {key}.",
    )
