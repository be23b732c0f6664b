"""Manages a run's checkpoint folders: complete or invisible, checked before use, kept or deleted by rule.

    checkpoints/
      latest                         the name of the newest complete checkpoint, flipped last
      step_00000320/
        megatron/                    weights and optimizer, as Megatron shards them
        rng/rank_00000.safetensors   random states of each rank
        remaining/rank_00000.safetensors   gradient steps not yet taken, if a rollout is open or waits
        hf/                          config and tokenizer
        state.json                   progress of the run
        SHA256SUMS                   of every other file; `sha256sum -c SHA256SUMS` checks it by hand
      step_00000280.torn/            set aside: a checksum did not match
      step_00000400.abandoned/       set aside: the run went on from an earlier one
      .step_00000360.<id>.unfinished/    being written, or left by a run that was killed
      .step_00000360.replaced.<id>/      the step was saved again; restored if a kill left no other copy
      .step_00000240.deleted.<id>/       being deleted

This module needs no tensor library.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.errors import CheckpointError
from megatron_dppo.runtime.files import (
    ABSENT,
    byte_count,
    entries_of,
    free_bytes,
    read_patiently,
    require_reachable,
)

logger = logging.getLogger(__name__)

WEIGHTS = "megatron"
LATEST = "latest"
SUMS = "SHA256SUMS"
STATE = "state.json"
_NAME = re.compile(r"step_\d{8,}")
MOST_ASIDE = 2
"""Checkpoints that are kept after they were set aside: the newest ones, until a later one is published."""
_ASIDE = re.compile(r"step_\d{8,}\.(torn|abandoned)\d*")


@dataclass(frozen=True)
class Kept:
    """A complete checkpoint with the fields that retention needs."""

    folder: Path
    rollout: int  # rollouts finished
    score: float | None  # value of checkpoint.best_metric; None in the middle of a rollout
    is_open: bool = False  # whether it is in the middle of a rollout


@dataclass(frozen=True)
class Retention:
    """Rules for keeping checkpoints; each adds to the others."""

    keep_last: int  # newest ones; 0 keeps all
    keep_every: int  # checkpoints after a multiple of this number of rollouts; 0 keeps none
    keep_best: int  # number of checkpoints with the best scores
    highest_is_best: bool

    def choose_deleted(self, checkpoints: Sequence[Kept]) -> list[Path]:
        """Return the checkpoints to delete, given all complete ones, oldest first."""
        if self.keep_last == 0:
            return []
        scored = [kept for kept in checkpoints if kept.score is not None]
        scored.sort(key=lambda kept: kept.score or 0.0, reverse=self.highest_is_best)
        stays = {kept.folder for kept in checkpoints[-self.keep_last :]}
        stays |= {kept.folder for kept in scored[: self.keep_best]}
        if self.keep_every:
            after = {kept.rollout: kept for kept in reversed(checkpoints) if not kept.is_open and kept.rollout}
            stays |= {kept.folder for rollout, kept in after.items() if rollout % self.keep_every == 0}
        return [kept.folder for kept in checkpoints if kept.folder not in stays]


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether a folder is a complete Megatron checkpoint, from a run or a conversion."""
    return (folder / WEIGHTS / "metadata.json").is_file()


def require_megatron_checkpoint(folder: Path) -> None:
    """Refuse a folder that is not a complete Megatron checkpoint; the error names a Hugging Face folder."""
    if is_megatron_checkpoint(folder):
        return
    found, action = f"no {WEIGHTS}/metadata.json", "Check the path."
    if (folder / "config.json").is_file():
        found = f"a Hugging Face folder, which has {found}"
        action = "Use that folder as it is, or name a checkpoint of a run."
    raise CheckpointError(
        f"{folder}: found {found}; expected a Megatron checkpoint, from megatron-dppo convert to-megatron or "
        f"from a run's checkpoints/. {action}"
    )


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after `step` gradient steps."""
    return f"step_{step:08d}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run's `checkpoints/`, oldest first, without checking their files."""
    found = [path for path in entries_of(folder) if _NAME.fullmatch(path.name)]
    for path in found:
        require_reachable(path)
    there = [path for path in found if read_patiently(path, path.is_dir)]
    return sorted(there, key=lambda path: int(path.name.removeprefix("step_")))


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints to resume from, best first: the one that `latest` names, then the earlier ones.

    If `latest` is missing or names no checkpoint, the newest comes first.
    """
    newest_first = complete(folder)[::-1]
    name = _latest(folder)
    names = [path.name for path in newest_first]
    if name in names:
        return newest_first[names.index(name) :]
    if name is not None:
        pointer = folder / LATEST
        logger.warning("%s names %r, which is not there; using the newest checkpoint", pointer, name[:80])
    return newest_first


def _latest(folder: Path) -> str | None:
    """Return the checkpoint name in `latest`; None if there is no such file."""
    pointer = folder / LATEST
    try:
        return read_patiently(pointer, lambda: pointer.read_text(errors="replace")).strip()
    except ABSENT:
        return None


def newest_between_rollouts(folder: Path, num_rollouts: int) -> Path | None:
    """Return the newest complete checkpoint of at most `num_rollouts` rollouts, with none open; not checked."""
    for checkpoint in reversed(complete(folder)):
        with contextlib.suppress(*ABSENT, ValueError, KeyError):
            content = _read_state(checkpoint)
            if content["open_rollout"] is None and content["state"]["rollout"] <= num_rollouts:
                return checkpoint
    return None


@dataclass(frozen=True)
class SavedRun:
    """Config and progress in the checkpoint that a resume would load; its files are not checked."""

    checkpoint: Path
    config: str  # resolved, as TOML; "" if an older version saved it
    prompts_digest: str
    num_rollouts: int  # finished

    @property
    def is_in_prompts(self) -> bool:
        """Whether the run's cursor is in a file of prompts, and not in saved rollouts."""
        return re.fullmatch("[0-9a-f]{32}", self.prompts_digest) is not None


def saved_run(folder: Path) -> SavedRun | None:
    """Read the saved run of the first readable candidate in a run's `checkpoints/`; None if there is none."""
    interrupted = _find_interrupted(folder)
    for checkpoint in candidates(folder) if interrupted is None else [interrupted]:
        with contextlib.suppress(*ABSENT, ValueError, KeyError, TypeError):
            content = _read_state(checkpoint)
            num_rollouts, digest = int(content["state"]["rollout"]), str(content["prompts_digest"])
            return SavedRun(checkpoint, content.get("config", ""), digest, num_rollouts)
    return None


def _read_state(checkpoint: Path) -> Any:
    """Return the content of state.json; raises one of `ABSENT` without a file, and ValueError if it is torn."""
    content = read_patiently(checkpoint / STATE, (checkpoint / STATE).read_bytes)
    sums = read_patiently(checkpoint / SUMS, (checkpoint / SUMS).read_text).splitlines()
    if f"{hashlib.sha256(content).hexdigest()}  {STATE}" not in sums:
        raise ValueError(f"{checkpoint / STATE} does not match its checksum")
    return json.loads(content)


def sums_of(files: Iterable[Path], root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by its path relative to `root`."""
    return {str(file.relative_to(root)): _sha256(file) for file in files}


def write_sums(checkpoint: Path, sums: dict[str, str]) -> None:
    """Write SHA256SUMS; the caller has hashed every other file."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    write_durably(checkpoint / SUMS, "".join(lines))


def faults(checkpoint: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return messages about faults in a checkpoint's content; an empty list if there are none.

    Args:
        checkpoint: A complete checkpoint's folder.
        share: (rank, size): only this rank's share of the files is hashed. All ranks together read each file
            once.
    """
    try:
        lines = read_patiently(checkpoint / SUMS, (checkpoint / SUMS).read_text).splitlines()
        sums = dict(line.split("  ", 1)[::-1] for line in lines)
    except (*ABSENT, ValueError) as error:
        return [f"{SUMS} cannot be read ({type(error).__name__})"]
    there = read_patiently(checkpoint, lambda: _files_of(checkpoint)) - {SUMS}
    found = [f"{name} is missing" for name in sorted(sums.keys() - there)]
    found += [f"{name} has no checksum" for name in sorted(there - sums.keys())]
    found += [] if STATE in sums else [f"{SUMS} is torn"]
    rank, size = share
    for name in sorted(sums.keys() & there)[rank::size]:
        try:
            digest = read_patiently(checkpoint / name, lambda name=name: _sha256(checkpoint / name))
        except ABSENT:
            found.append(f"{name} is missing")
            continue
        found += [] if digest == sums[name] else [f"{name} does not match its checksum"]
    return found


def _files_of(checkpoint: Path) -> set[str]:
    """Return the paths of all files of a checkpoint, relative to it."""

    def stop(error: OSError) -> None:
        raise error

    found = set[str]()
    for folder, folders, files in os.walk(checkpoint, onerror=stop, followlinks=True):
        for name in (*folders, *files):
            require_reachable(Path(folder, name))
        found |= {Path(folder, name).relative_to(checkpoint).as_posix() for name in files}
    return found


def set_aside(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `<name>.<why>`, so that it is no longer loaded or deleted."""
    number = 1
    while (aside := checkpoint.with_name(f"{checkpoint.name}.{why}{'' if number == 1 else number}")).exists():
        number += 1
    checkpoint.rename(aside)
    return aside


def set_aside_newer(checkpoint: Path) -> list[Path]:
    """Set aside the complete checkpoints after this one, because a run resumes from this one.

    Otherwise they would count as the newest, and retention would delete the checkpoints that this run writes.
    They exist if `latest` was set back by hand, or if a run was killed before it updated `latest`.
    """
    every = complete(checkpoint.parent)
    return [set_aside(newer, "abandoned") for newer in every[every.index(checkpoint) + 1 :]]


def oldest_aside(folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside, but for the `MOST_ASIDE` newest ones."""
    found = [path for path in entries_of(folder) if _ASIDE.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_ctime_ns)[:-MOST_ASIDE]


def publish(unfinished: Path, final: Path) -> None:
    """Make a written checkpoint visible, then point `latest` at it; replace a checkpoint of the same step.

    A kill between the two renames leaves neither visible. `recover` then makes one of them visible.
    """
    if final.exists():
        hide(final, "replaced")
    unfinished.rename(final)
    sync([final.parent])
    set_latest(final)


def recover(folder: Path) -> Path | None:
    """Finish an interrupted `publish`; return the checkpoint that becomes visible again, if any.

    The new checkpoint is used if it is complete, and the earlier one of the same step otherwise.
    No other process may be using the folder.
    """
    replaced = _find_interrupted(folder)
    if replaced is None:
        return None
    step = _step_of(replaced)
    written = [path for path in folder.glob(f".{step}.*.unfinished") if not faults(path)]
    newest = max(written, key=lambda path: path.name, default=replaced)
    recovered = newest.rename(folder / step)
    sync([folder])
    return recovered


def _find_interrupted(folder: Path) -> Path | None:
    """Return the replaced copy of the checkpoint that `latest` names, if neither copy is visible."""
    name = _latest(folder)
    if name is None or not _NAME.fullmatch(name) or (folder / name).exists():
        return None
    return max(folder.glob(f".{name}.replaced.*"), key=lambda path: path.name, default=None)


def hide(checkpoint: Path, why: str) -> Path:
    """Rename a checkpoint to `.<name>.<why>.<id>`: it stays complete, but is no longer used or counted."""
    return checkpoint.rename(checkpoint.with_name(f".{_step_of(checkpoint)}.{why}.{time.time_ns()}"))


def _step_of(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix(".").partition(".")[0]


def set_latest(checkpoint: Path) -> None:
    """Set `latest` to a complete checkpoint, atomically."""
    temporary = checkpoint.with_name(f".{LATEST}.unfinished")
    write_durably(temporary, checkpoint.name + "\n")
    temporary.replace(checkpoint.with_name(LATEST))
    sync([checkpoint.parent])


def delete(checkpoints: Iterable[Path]) -> None:
    """Hide checkpoints at once, and delete their files in the background."""
    hidden = list[Path]()
    for checkpoint in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # an earlier call has deleted it meanwhile
            hidden.append(hide(checkpoint, "deleted"))
    if hidden:
        threading.Thread(target=_remove, args=(hidden,), daemon=True, name="delete checkpoints").start()


def leftovers(folder: Path) -> list[Path]:
    """Return the partly written, replaced or partly deleted folders of earlier processes."""
    return [path for path in folder.glob(".step_*") if path.is_dir()]


def require_free(folder: Path, num_bytes: int, reserve_bytes: int) -> None:
    """Raise an error if the disk has too little free space."""
    free = free_bytes(folder)
    if free - num_bytes < reserve_bytes:
        raise CheckpointError(
            f"{folder}: {byte_count(free)} are free; expected {byte_count(num_bytes)} for the checkpoint and "
            f"checkpoint.reserve_gib = {reserve_bytes / (1 << 30):.2f} besides. Free some space, or lower "
            "checkpoint.keep_last."
        )


def write_durably(file: Path, text: str) -> None:
    """Write a small file and wait until it is on the disk."""
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(paths: Iterable[Path]) -> None:
    """Wait until files of other writers, or a folder's entries, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
