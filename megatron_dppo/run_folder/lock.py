"""Locks a run folder to one process, and takes over the lock of an owner that has died.

The operating system's lock (flock) is reliable within a host, and ends with its process however that ends. It
may not work across hosts, and a file server may keep it for a host that has lost its power. So the owner also
writes an entry into the lock file, and rewrites it every few seconds as a heartbeat. `STEPS` is the complete
rule for what follows from the lock and the entry. An owner whose entry is gone ends.

The library `filelock` does not offer both. Its FileLock only uses flock, and fails on a file system without
locks. Its SoftFileLease only uses heartbeats, and takes a folder from a process of this host that is merely
stopped.
"""

import contextlib
import fcntl
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from megatron_dppo.errors import ConfigError, InUseError, Problem, StorageError, writing_to
from megatron_dppo.run_folder import lock_file as file
from megatron_dppo.run_folder.lock_file import LOCK, Entry, Lock
from megatron_dppo.runtime.files import ABSENT

logger = logging.getLogger(__name__)

PATIENCE_S = 600.0
SILENT_S = 180.0
_BEATS = 3  # missing heartbeats after which an owner is silent
_LOG_EVERY_S = 60.0

Owner = Literal["nobody", "here", "living", "elsewhere"]
"""The entry in the lock file: none (or half written), of a process of this host, the same with a new heartbeat
since an earlier look, or of a process of another host."""
Silence = Literal["at once", "after beats", "after minutes"]
Step = Literal["take", "replace", "refuse", "wait"]
"""Write an entry into the file, put a new file in its place, raise, or look again."""
STEPS: Mapping[tuple[Lock, Owner], tuple[Step, Silence]] = {
    ("ours", "nobody"): ("take", "at once"),
    ("ours", "here"): ("take", "at once"),  # the owner has died: flock ends with its process
    ("ours", "living"): ("take", "at once"),
    ("ours", "elsewhere"): ("take", "after beats"),  # flock may not reach that host
    ("held", "nobody"): ("refuse", "after beats"),  # the owner is about to write its entry
    ("held", "here"): ("refuse", "at once"),
    ("held", "living"): ("refuse", "at once"),
    ("held", "elsewhere"): ("replace", "after minutes"),  # the file server may keep the lock of a dead host
    ("missing", "nobody"): ("take", "at once"),
    ("missing", "here"): ("take", "after beats"),
    ("missing", "living"): ("refuse", "at once"),
    ("missing", "elsewhere"): ("take", "after beats"),
}
"""The step for each state, and how long the entry must not have changed; until then, the process waits."""


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
        me = file.this_process()
        stream = _acquire(folder, me, Watch(folder, key, beat_s, patience_s, silent_s))
    with stream:
        ended = threading.Event()
        arguments = stream, folder, me, ended, beat_s
        beats = threading.Thread(target=file.keep_beating, args=arguments, daemon=True, name="run lock")
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            with contextlib.suppress(StorageError):  # heartbeats end, so that it counts as gone
                if file.is_entry_of(file.read(folder), me):
                    stream.truncate(0)  # empty is free; removing the file would race with the next owner


def holder(folder: Path, beat_s: float = 5.0) -> str | None:
    """Describe the process that holds the run folder; None if the folder is free.

    Args:
        folder: Run folder.
        beat_s: Seconds between heartbeats. An owner on another host is watched for three times as long.
    """
    owner, lock = file.read(folder), "missing"
    if not owner:
        return None
    with contextlib.suppress(OSError), (folder / LOCK).open("rb") as stream:
        lock = file.try_lock(stream, fcntl.LOCK_SH)
    is_gone = lock == "ours" and file.is_here(owner)
    is_held = lock == "held" or (not is_gone and file.is_beating(folder, beat_s))
    return file.words(owner) if is_held else None


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
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock_") as new:
            now = os.fstat(new.fileno()).st_mtime
    except OSError:
        now = time.time()
    return status.st_size > 0 and now - status.st_mtime < silent_s


def is_restarted() -> bool:
    """Return whether SLURM has started this job before: its attempt before may still hold the run folder."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@dataclass
class Watch:
    """Watches the owner of a run folder, and decides with `STEPS`."""

    folder: Path
    key: str
    beat_s: float
    patience_s: float
    silent_s: float
    began: float = field(default_factory=time.monotonic)
    entry: Entry | None = None  # at the last look
    changed_at: float = 0.0  # when the entry last changed
    has_lived: bool = False  # whether that change replaced another entry
    logged_at: float = -math.inf

    def next_step(self, lock: Lock, entry: Entry) -> Step:
        """Return the step after a look at the lock and its entry; raise if the owner keeps the folder.

        A job that SLURM has started again is never refused: it waits.
        """
        now = time.monotonic()
        if lock == "missing" and self.entry is None:
            logger.warning("%s: the file system has no locks; relying only on heartbeats", self.folder / LOCK)
        if entry != self.entry:
            self.has_lived, self.entry, self.changed_at = bool(self.entry and entry), entry, now
        owner: Owner = "nobody"
        if entry:
            here: Owner = "living" if self.has_lived and not is_restarted() else "here"
            owner = here if file.is_here(entry) else "elsewhere"
        step, silence = STEPS[lock, owner]
        after_s = {"at once": 0.0, "after beats": _BEATS * self.beat_s, "after minutes": self.silent_s}[silence]
        is_due = now - self.changed_at >= after_s
        if is_due and step == "refuse" and not is_restarted():
            raise ConfigError(self._in_use())
        if is_due and step != "refuse":
            return step
        if now - self.began > self.patience_s:
            raise InUseError(self._in_use())
        if now - self.logged_at > _LOG_EVERY_S:
            self.logged_at = now
            text = "%s: waiting for %s to release the folder, without a sign of life for %.0f s"
            logger.warning(text, self.folder, file.words(entry), now - self.changed_at)
        return "wait"

    def _in_use(self) -> Problem:
        found = f"{self.folder}, in use by {file.words(self.entry or {})}"
        action = f"Wait for that run or end it, or choose another {self.key}."
        return Problem(self.key, found, "a folder that no other run is using", action)


def _acquire(folder: Path, me: Entry, watch: Watch) -> BinaryIO:
    """Open the lock file, wait until it is free, and write this process's entry; return the locked file."""
    while True:
        stream = file.open_in(folder)
        try:
            lock, owner = file.try_lock(stream), file.read(folder)
            if watch.entry and not owner:  # free, or read while the owner was writing
                time.sleep(watch.beat_s / 4)
                owner = file.read(folder)
            step = watch.next_step(lock, owner)
            if step == "replace":
                logger.warning("%s: taking over from %s, which is silent", folder, file.words(owner))
                stream.close()
                stream = file.replace(folder, me)
                time.sleep(watch.beat_s)  # whoever replaces the file last at the same time is the owner
            elif step == "take" and file.is_same_file(stream, folder):
                if owner:
                    log_text = "%s: taking over from %s, which ended without releasing it"
                    logger.warning(log_text, folder, file.words(owner))
                file.write(stream, me)
                if lock == "missing":  # another host may have found the folder free in the same moment
                    time.sleep(watch.beat_s)
                    step = "take" if file.is_entry_of(file.read(folder), me) else "wait"  # whoever wrote last
            if step != "wait" and file.is_same_file(stream, folder):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()
        time.sleep(watch.beat_s / 4)
