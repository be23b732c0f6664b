"""Locks a run folder to one process, and takes over the lock of an owner that has died.

The operating system's lock (flock) is reliable within a host, and ends with its process however that ends.
It may not work across hosts, so the owner also rewrites the lock file every few seconds as a heartbeat. An
owner on another host without a heartbeat is considered gone. A file server may keep the lock of a host that has
lost its power, so after some minutes of silence the lock file is replaced. An owner whose entry is gone ends.

The library `filelock` does not offer both. Its FileLock only uses flock, and fails on a file system without
locks. Its SoftFileLease only uses heartbeats, and takes a folder from a process of this host that is merely
stopped.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import shlex
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dppo.errors import ConfigError, InUseError, Problem, StorageError, writing_to
from megatron_dppo.runtime.files import ABSENT, read_patiently

logger = logging.getLogger(__name__)

LOCK = "run.lock"
PATIENCE_S = 600.0
SILENT_S = 180.0
_LOG_EVERY_S = 60.0


@contextlib.contextmanager
def locked(
    folder: Path,
    beat_s: float = 5.0,
    key: str = "run.folder",
    patience_s: float = PATIENCE_S,
    silent_s: float = SILENT_S,
) -> Iterator[None]:
    """Lock the run folder while the body runs.

    A living owner on this host is an error at once. An owner on another host, or of a job that SLURM has
    started again, may be the job's attempt before, which is ending: it is waited for.

    Args:
        folder: Run folder; created if it is missing.
        beat_s: Seconds between heartbeats. If the lock itself is free, an owner on another host is considered
            gone after three missing ones.
        key: Config key or option that names the folder, for the message.
        patience_s: Maximum seconds to wait for an owner that lives.
        silent_s: Seconds without a heartbeat after which the lock of an owner on another host is taken over
            although the file server still holds it. The owner ends when it finds another entry.
    """
    with writing_to(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
        me = _this_process()
        stream = _acquire(folder, me, _Waiting(folder, key, beat_s, patience_s, silent_s))
    with stream:
        ended = threading.Event()
        beats = threading.Thread(
            target=_beat, args=(stream, folder, me, ended, beat_s), daemon=True, name="run lock"
        )
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            with contextlib.suppress(StorageError):  # heartbeats end, so that it counts as gone
                if _is_entry_of(_read(folder), me):
                    stream.truncate(0)  # empty is free; removing the file would race with the next owner


def holder(folder: Path, beat_s: float = 5.0) -> str | None:
    """Describe the process that holds the run folder; None if the folder is free.

    Args:
        folder: Run folder.
        beat_s: Seconds between heartbeats. An owner on another host is watched for three times as long.
    """
    owner = _read(folder)
    if not owner:
        return None
    is_here = _is_here(owner)
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

    The age of a heartbeat is by the clock of the folder's file server, which this host's may differ from.

    Args:
        folder: Run folder.
        silent_s: Seconds without a heartbeat after which the owner is considered gone.

    Returns:
        Whether the folder is held; None without a lock file: no process of this version has held the folder.
    """
    try:
        status = (folder / LOCK).stat()
    except ABSENT:
        return None
    return status.st_size > 0 and _clock_of(folder) - status.st_mtime < silent_s


def _clock_of(folder: Path) -> float:
    """Return the time that the file server gives to a new file; this host's if none can be created."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock_") as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


@dataclass
class _Waiting:
    """Waits for the owner of a run folder, and tells a living owner from a silent one."""

    folder: Path
    key: str
    beat_s: float
    patience_s: float
    silent_s: float
    began: float = field(default_factory=time.monotonic)
    seen: dict[str, Any] | None = None  # the owner's entry at the last look
    seen_at: float = 0.0  # when the entry last changed
    has_lived: bool = False
    logged_at: float = -math.inf

    def is_gone(self, owner: dict[str, Any], is_free: bool | None) -> bool:
        """Return whether the owner is gone, and refuse it if it lives and is not to be waited for."""
        now = time.monotonic()
        if owner != self.seen:
            self.has_lived = bool(self.seen) and bool(owner)
            self.seen, self.seen_at = owner, now
        silent_s = now - self.seen_at
        is_here = _is_here(owner) or not owner  # without an entry: the owner is about to write one
        if is_here and not is_restarted():
            if self.has_lived or (is_free is False and (owner or silent_s > 3 * self.beat_s)):
                raise ConfigError(_in_use(self.folder, self.key, owner))
        elif is_free is False and not is_here and silent_s > self.silent_s:
            return True
        if is_free is not False and silent_s > 3 * self.beat_s:
            return True
        if now - self.began > self.patience_s:
            raise InUseError(_in_use(self.folder, self.key, owner))
        if now - self.logged_at > _LOG_EVERY_S:
            self.logged_at = now
            who = _words(owner) if owner else "another process"
            text = "%s: waiting for %s to release the folder, without a sign of life for %.0f s"
            logger.warning(text, self.folder, who, silent_s)
        return False


def is_restarted() -> bool:
    """Return whether SLURM has started this job before: its attempt before may still hold the run folder."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _acquire(folder: Path, me: dict[str, Any], waiting: _Waiting) -> BinaryIO:
    """Open the lock file, wait until it is free, and write this process's entry; return the locked file."""
    has_warned = False
    while True:
        stream = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        try:
            is_free, owner = _lock(stream), _read(folder)
            if waiting.seen and not owner:  # free, or read while the owner was writing
                time.sleep(waiting.beat_s / 4)
                owner = _read(folder)
            if is_free is None and not has_warned:
                has_warned = True
                logger.warning("%s: the file system has no locks; relying only on heartbeats", folder / LOCK)
            is_ours = is_free is not False and (not owner or (is_free and _is_here(owner)))
            if not is_ours:
                is_ours = waiting.is_gone(owner, is_free)
            if is_ours and is_free is False:
                logger.warning("%s: taking over from %s, which is silent", folder, _words(owner))
                stream.close()
                stream = _replace(folder, me)
                time.sleep(waiting.beat_s)  # whoever replaces the file last at the same time is the owner
            elif is_ours and _is_same_file(stream, folder):
                if owner:
                    log_text = "%s: taking over from %s, which ended without releasing it"
                    logger.warning(log_text, folder, _words(owner))
                _write(stream, me)
                if is_free is None:  # another host may have found the folder free in the same moment
                    time.sleep(waiting.beat_s)
                    is_ours = _is_entry_of(_read(folder), me)  # whoever wrote last
            if is_ours and _is_same_file(stream, folder):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()
        time.sleep(waiting.beat_s / 4)


def _replace(folder: Path, me: dict[str, Any]) -> BinaryIO:
    """Put a new lock file, locked and with this process's entry, in the place of one that is held."""
    temporary = folder / f".{LOCK}.{uuid.uuid4().hex[:12]}.tmp"
    stream = temporary.open("x+b", buffering=0)
    _lock(stream)
    _write(stream, me)
    temporary.replace(folder / LOCK)
    return stream


def _is_same_file(stream: BinaryIO, folder: Path) -> bool:
    """Return whether the open file is still the folder's lock file, and was not replaced."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), (folder / LOCK).stat())
    except OSError:
        return False


def _lock(stream: BinaryIO) -> bool | None:
    """Try to take the lock; return whether this process has it, None if the file system has no locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _this_process() -> dict[str, Any]:
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


def _is_here(owner: dict[str, Any]) -> bool:
    """Return whether the owner's process runs, or ran, on this host."""
    return owner.get("host") == socket.gethostname() and owner.get("boot", _boot_id()) == _boot_id()


def _is_entry_of(owner: dict[str, Any], me: dict[str, Any]) -> bool:
    return all(owner.get(name) == me[name] for name in ("host", "boot", "pid", "since"))


def _beat(stream: BinaryIO, folder: Path, me: dict[str, Any], ended: threading.Event, beat_s: float) -> None:
    is_written = False
    while not ended.wait(beat_s):
        try:
            owner = _read(folder)
        except StorageError as error:
            logger.warning("%s: no heartbeat while its disk fails: %s", folder, error)
            continue
        if _is_entry_of(owner, me):
            is_written = True
        elif owner or (is_written and _is_empty(folder)):
            new = _words(owner) if owner else "a process that has released it"
            logger.critical("%s: taken over by %s; this process ends at once", folder, new)
            os._exit(1)  # it must not write another row, nor save
        me["beat"] += 1
        _write(stream, me)


def _is_empty(folder: Path) -> bool:
    try:
        return (folder / LOCK).stat().st_size == 0
    except OSError:
        return False


def _write(stream: BinaryIO, owner: dict[str, Any]) -> None:
    """Overwrite the file in one write, so that the file of a folder in use is never empty."""
    with contextlib.suppress(OSError):  # a full disk ends the run elsewhere, with a better message
        stream.seek(0)
        stream.write(json.dumps(owner).encode() + b"\n")
        stream.truncate()


def _read(folder: Path) -> dict[str, Any]:
    """Read the owner's entry; empty if the folder is free, or the owner is just writing."""
    try:
        owner: Any = json.loads(read_patiently(folder / LOCK, (folder / LOCK).read_text))
        return owner if isinstance(owner, dict) else {}
    except (*ABSENT, ValueError):
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
