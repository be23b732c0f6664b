"""Locks a run folder to one process, and takes over the lock of an owner that has died.

The operating system's lock (flock) is reliable within a host, and ends with its process however that ends.
It may not work across hosts, so the owner also rewrites the lock file every few seconds as a heartbeat. An
owner on another host without a heartbeat is considered gone.

The library `filelock` does not offer both. Its FileLock only uses flock, and fails on a file system without
locks. Its SoftFileLease only uses heartbeats, and takes a folder from a process of this host that is merely
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
    """Lock the run folder while the body runs.

    Args:
        folder: Run folder; created if it is missing.
        beat_s: Seconds between heartbeats. An owner on another host is considered gone after three missing
            ones.
        key: Config key or option that names the folder, for the message.

    Raises:
        ConfigError: Another process holds the lock (the message names it), or the folder is not writable.
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
    """Describe the process that holds the run folder; None if the folder is free.

    Args:
        folder: Run folder.
        beat_s: Seconds between heartbeats. An owner on another host is watched for three times as long.
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
    """Return whether a process holds the run folder, without locking it.

    Args:
        folder: Run folder.
        silent_s: Seconds without a heartbeat after which the owner is considered gone.

    Returns:
        Whether the folder is held; None without a lock file: no process of this version has held the folder.
    """
    try:
        status = (folder / LOCK).stat()
    except OSError:
        return None
    return status.st_size > 0 and time.time() - status.st_mtime < silent_s


def _lock(stream: BinaryIO) -> bool | None:
    """Try to take the lock; return whether this process has it, None if the file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: the file system has no locks (%s); relying only on heartbeats", stream.name, error)
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
    """Overwrite the file in one write, so that the file of a folder in use is never empty."""
    with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, with a better message
        stream.seek(0)
        stream.write(json.dumps(owner).encode() + b"\n")
        stream.truncate()


def _read(folder: Path) -> dict[str, Any]:
    """Read the owner's entry; empty if the folder is free, or the owner is just writing."""
    try:
        owner: Any = json.loads((folder / LOCK).read_text())
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError):
        return {}


def _is_alive(folder: Path, beat_s: float) -> bool:
    """Whether an owner on a host without shared locks is alive."""
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
