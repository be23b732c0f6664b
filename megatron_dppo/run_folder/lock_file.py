"""The lock file of a run folder: flock, the owner's entry, and its heartbeat. `lock` decides who owns it."""

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
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_dppo.errors import StorageError
from megatron_dppo.runtime.files import ABSENT, read_patiently

logger = logging.getLogger(__name__)

LOCK = "run.lock"
Entry = dict[str, Any]
"""Identity of the owner's process, and the number of its heartbeats; empty without an owner."""
Lock = Literal["ours", "held", "missing"]
"""flock's reply: this process has the lock, another process has it, or the file system has no locks."""


def open_in(folder: Path) -> BinaryIO:
    """Open the folder's lock file; create it if it is missing."""
    return os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)


def try_lock(stream: BinaryIO, kind: int = fcntl.LOCK_EX) -> Lock:
    """Try to take flock on the open file."""
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError:
        return "missing"
    return "ours"


def replace(folder: Path, me: Entry) -> BinaryIO:
    """Put a new lock file, locked and with this process's entry, in the place of one that is held."""
    temporary = folder / f".{LOCK}.{uuid.uuid4().hex[:12]}.tmp"
    stream = temporary.open("x+b", buffering=0)
    try_lock(stream)
    write(stream, me)
    temporary.replace(folder / LOCK)
    return stream


def is_same_file(stream: BinaryIO, folder: Path) -> bool:
    """Return whether the open file is still the folder's lock file, and was not replaced."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), (folder / LOCK).stat())
    except OSError:
        return False


def write(stream: BinaryIO, owner: Entry) -> None:
    """Overwrite the file in one write, so that the file of a folder in use is never empty."""
    with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, with a better message
        stream.seek(0)
        stream.write(json.dumps(owner).encode() + b"\n")
        stream.truncate()


def read(folder: Path) -> Entry:
    """Read the owner's entry; empty if the folder is free, or the owner is just writing."""
    try:
        owner: Any = json.loads(read_patiently(folder / LOCK, (folder / LOCK).read_text))
        return owner if isinstance(owner, dict) else {}
    except (*ABSENT, ValueError):
        return {}


def keep_beating(stream: BinaryIO, folder: Path, me: Entry, ended: threading.Event, beat_s: float) -> None:
    """Rewrite this process's entry until `ended`; end the process if another one has taken the folder."""
    is_written = False
    while not ended.wait(beat_s):
        try:
            owner = read(folder)
        except StorageError as error:
            logger.warning("%s: no heartbeat while its disk fails: %s", folder, error)
            continue
        if is_entry_of(owner, me):
            is_written = True
        elif owner or (is_written and _is_empty(folder)):
            new = words(owner) if owner else "a process that has released it"
            logger.critical("%s: taken over by %s; this process ends at once", folder, new)
            os._exit(1)  # it must not write another row, nor save
        me["beat"] += 1
        write(stream, me)


def _is_empty(folder: Path) -> bool:
    try:
        return (folder / LOCK).stat().st_size == 0
    except OSError:
        return False


def this_process() -> Entry:
    """Return the entry of this process, before its first heartbeat."""
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "beat": 0,
    }


def _boot_id() -> str:
    """Return an id of the running kernel, which tells two hosts of one name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_here(owner: Entry) -> bool:
    """Return whether the owner's process runs, or ran, on this host."""
    return owner.get("host") == socket.gethostname() and owner.get("boot", _boot_id()) == _boot_id()


def is_entry_of(owner: Entry, me: Entry) -> bool:
    """Return whether an entry is of this process, whatever its number of heartbeats."""
    return all(owner.get(name) == me[name] for name in ("host", "boot", "pid", "since"))


def is_beating(folder: Path, beat_s: float) -> bool:
    """Return whether the entry changes within three heartbeats."""
    before, seconds = read(folder).get("beat"), 3 * beat_s
    logger.info("%s: an owner is named that a lock may not reach; waiting %.0f s for it", folder, seconds)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(beat_s / 4)
        if read(folder).get("beat", before) != before:
            return True
    return False


def words(owner: Entry) -> str:
    """Name the owner in a message."""
    if not owner:
        return "another process"
    pid, host, since = (owner.get(key, "?") for key in ("pid", "host", "since"))
    return f"process {pid} on {host} (since {since}: {owner.get('command', '?')})"
