"""Saves a run's checkpoints during training, and resumes from them bitwise exactly.

`checkpoint_folder.py` documents the layout on disk.
"""

import json
import logging
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] - its path is untyped

from megatron_dppo.actor.actor import Actor
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.checkpoints import checkpoint_folder
from megatron_dppo.checkpoints.checkpoint_folder import STATE, Kept, Retention
from megatron_dppo.checkpoints.megatron_folder import (
    HF,
    WEIGHTS,
    fit_to_chain,
    hf_files,
    is_resharded,
    load_model_states,
    load_sharded,
    model_states,
    require_reshardable,
)
from megatron_dppo.checkpoints.megatron_save import PendingSave, bytes_to_write
from megatron_dppo.checkpoints.model_files import copy_model_files
from megatron_dppo.config.schema import CheckpointConfig
from megatron_dppo.data.batches.batch_file import bytes_of, read_batches, write_batches
from megatron_dppo.errors import CheckpointError, StorageError
from megatron_dppo.mcore.fixes import prime_adam_states
from megatron_dppo.mcore.training_states import random_states, restore_random_states
from megatron_dppo.run.state import RunPoint
from megatron_dppo.run_folder.folder import NO_CHECKPOINT
from megatron_dppo.runtime.files import ABSENT, read_patiently, save_tensors
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import RunState, TrainBatch

logger = logging.getLogger(__name__)

_MEGATRON_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


class Checkpoints:
    """Saves and restores a run's checkpoints. All ranks call each method together."""

    def __init__(self, folder: Path, options: CheckpointConfig, model_folder: Path, runtime: Runtime) -> None:
        """Recover a checkpoint that a killed run was replacing, and delete the other leftovers.

        Args:
            folder: Folder `checkpoints/` of the run; no other process may be using it.
            options: Section `[checkpoint]` of the config.
            model_folder: Folder of `model.load`; its config and tokenizer are copied.
            runtime: Runtime of this process.
        """
        self._folder, self._options, self._runtime = folder, options, runtime
        self._model_folder = model_folder
        self._underway: _Save | None = None
        self._saved: RunState | None = None
        self._failed_in_a_row = 0
        runtime.on_main(self._tidy)

    def _tidy(self) -> None:
        if recovered := checkpoint_folder.recover(self._folder):
            logger.warning("%s: its replacement was interrupted; it is complete and used again", recovered)
        checkpoint_folder.delete(checkpoint_folder.leftovers(self._folder))

    def save(self, actor: Actor, point: RunPoint) -> float:
        """Start writing a checkpoint; it is on disk on return if `asynchronous` is off, or else after `wait`.

        A failed save is logged and counted, and no earlier checkpoint is deleted.

        Returns:
            Seconds that training waited.
        """
        started = time.perf_counter()
        self.complete()
        unfinished = self._runtime.on_main(lambda: self._begin(point.state.step))
        with actor.memory.states_here():
            state = _sharded_state(actor, is_loading=False)
            own_bytes = bytes_to_write(state) + sum(bytes_of(step) for step in point.steps)
            if not self._has_room(own_bytes, unfinished):
                return time.perf_counter() - started
            pending = PendingSave(state, unfinished / WEIGHTS, is_copied=self._options.asynchronous)
            del state
            save = _Save(
                unfinished, point, actor.layout, pending, self._runtime.rank, point.steps, random_states()
            )
            self._underway = save
            save.thread.start()
            if not self._options.asynchronous:  # the written tensors are on the device only in this block
                save.thread.join()
        if not self._options.asynchronous:
            self.complete()
        return time.perf_counter() - started

    def _has_room(self, own_bytes: int, unfinished: Path) -> bool:
        """Whether the disk has room for all ranks' bytes; a save without room counts as failed."""
        total, reserve = sum(self._runtime.all_gather(own_bytes)), int(self._options.reserve_gib * (1 << 30))
        try:
            self._runtime.on_main(lambda: checkpoint_folder.require_free(self._folder, total, reserve))
        except CheckpointError as error:
            self._fail(unfinished, str(error))
            return False
        return True

    def holds(self, state: RunState) -> bool:
        """Whether this state is saved, or being saved."""
        return state in (self._saved, self._underway.point.state if self._underway else None)

    @property
    def is_writing(self) -> bool:
        """Whether a save is still being written."""
        return self._underway is not None

    def poll(self) -> None:
        """Publish a save that all ranks have written; cheap if no save is in progress."""
        if self._underway and not any(self._runtime.all_gather(self._underway.thread.is_alive())):
            self.complete()

    def wait(self) -> None:
        """Wait until the latest save is published."""
        self.complete()
        if self._failed_in_a_row:
            raise CheckpointError(
                f"{self._folder}: the last save failed, as logged above. A resume loses the training since the "
                "checkpoint before it. Fix the cause and start the same command again."
            )

    def resume(self, actor: Actor) -> RunPoint | None:
        """Restore the latest complete checkpoint; return None if there never was one.

        A checkpoint whose content is torn is renamed and reported, and the one before it is used.
        """
        found = self._newest_whole()
        if found is None:
            return None
        point = load(found, actor, self._runtime)
        self._saved = point.state
        for newer in self._runtime.on_main(lambda: checkpoint_folder.set_aside_newer(found)):
            if self._runtime.is_main:
                logger.warning("%s is newer than the checkpoint that the run resumes from", newer)
        if self._runtime.is_main:
            logger.info("resuming from %s: %d gradient steps are done", found, point.state.step)
        return point

    def go_back(self, actor: Actor, num_rollouts: int) -> RunPoint | None:
        """Restore the newest checkpoint of at most `num_rollouts` rollouts; return None if there is none."""
        self.complete()
        find = checkpoint_folder.newest_between_rollouts
        found = self._runtime.on_main(lambda: find(self._folder, num_rollouts))
        if found is None:
            return None
        self._runtime.on_main(lambda: checkpoint_folder.set_latest(found))
        return self.resume(actor)

    def _newest_whole(self) -> Path | None:
        runtime = self._runtime
        candidates = runtime.on_main(lambda: checkpoint_folder.candidates(self._folder))
        for candidate in candidates:
            faults = self._faults(candidate)
            if not faults:
                return candidate
            torn = runtime.on_main(lambda torn=candidate: checkpoint_folder.set_aside(torn, "torn"))
            if runtime.is_main:
                logger.warning("%s is torn (%s); kept as %s", candidate, "; ".join(faults[:3]), torn.name)
        if candidates:
            raise CheckpointError(
                f"{self._folder}: all {len(candidates)} checkpoints are torn; they are kept as *.torn. "
                "Restore one from a backup, or start a new run.folder."
            )
        return None

    def _faults(self, candidate: Path) -> list[str]:
        """Return the faults that all ranks find in a checkpoint's content."""
        own, unread = list[str](), None
        try:
            own = checkpoint_folder.faults(candidate, (self._runtime.rank, self._runtime.world_size))
        except StorageError as error:
            unread = str(error)
        of_ranks = self._runtime.all_gather((own, unread))
        for rank, (_, message) in enumerate(of_ranks):
            if message is not None:
                raise StorageError(f"rank {rank}: {message}")
        return sorted({fault for faults, _ in of_ranks for fault in faults})

    def _begin(self, step: int) -> Path:
        unfinished = self._folder / f".{checkpoint_folder.name_of(step)}.{time.time_ns()}.unfinished"
        for name in (WEIGHTS, "rng", "remaining"):
            (unfinished / name).mkdir(parents=True)
        return unfinished

    def complete(self) -> None:
        """Wait for all ranks' writers of a save in progress, and publish it if all succeeded."""
        save, self._underway = self._underway, None
        if save is None:
            return
        save.thread.join()
        errors = self._runtime.all_gather(save.error)
        failed = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)
        if failed is not None:
            self._fail(save.unfinished, f"rank {failed[0]}: {failed[1]}")
            return
        try:
            save.pending.finish()
        except CheckpointError as error:
            self._fail(save.unfinished, str(error))
            return
        try:
            sums = {name: digest for own in self._runtime.all_gather(save.sums) for name, digest in own.items()}
            self._runtime.on_main(lambda: self._publish(save, sums))
        except (CheckpointError, OSError, StorageError) as error:
            self._fail(save.unfinished, str(error))
            return
        self._saved, self._failed_in_a_row = save.point.state, 0

    def _publish(self, save: "_Save", sums: dict[str, str]) -> None:
        """On rank 0, write shared files and checksums, then the names that make the checkpoint visible."""
        unfinished, point = save.unfinished, save.point
        copy_model_files(hf_files(self._model_folder), unfinished / HF)
        checkpoint_folder.write_durably(unfinished / STATE, point.to_json(save.layout))
        others = [
            file
            for file in unfinished.rglob("*")
            if file.is_file() and str(file.relative_to(unfinished)) not in sums
        ]
        checkpoint_folder.sync(others)
        checkpoint_folder.write_sums(unfinished, sums | checkpoint_folder.sums_of(others, unfinished))
        checkpoint_folder.publish(unfinished, self._folder / checkpoint_folder.name_of(point.state.step))
        (self._folder.parent / NO_CHECKPOINT).unlink(missing_ok=True)
        try:
            outdated = [*self._outdated(), *checkpoint_folder.oldest_aside(self._folder)]
            checkpoint_folder.delete([*outdated, *checkpoint_folder.leftovers(self._folder)])
        except (OSError, StorageError) as error:  # the new checkpoint is published
            logger.warning("%s: old checkpoints stay until the next save: %s", self._folder, error)

    def _outdated(self) -> list[Path]:
        options = self._options
        retention = Retention(
            options.keep_last, options.keep_every, options.keep_best, options.best_is == "highest"
        )
        kept: list[Kept] = []
        for folder in checkpoint_folder.complete(self._folder):
            try:
                content = _read_state(folder)
                is_open = content["open_rollout"] is not None
                kept.append(Kept(folder, content["state"]["rollout"], content["score"], is_open))
            except (CheckpointError, KeyError, TypeError):
                logger.warning("%s/%s cannot be read; the folder is left alone", folder, STATE)
        return retention.choose_deleted(kept)

    def _fail(self, unfinished: Path, reason: str) -> None:
        self._failed_in_a_row += 1
        reason = f"{reason} ({shutil.disk_usage(self._folder).free} bytes are free)"
        self._runtime.on_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        if self._runtime.is_main:
            logger.error("the checkpoint could not be written, earlier ones are untouched: %s", reason)
        if self._failed_in_a_row >= self._options.max_failed_saves:
            raise CheckpointError(
                f"{self._folder}: {self._failed_in_a_row} saves in a row failed; expected fewer than "
                f"checkpoint.max_failed_saves = {self._options.max_failed_saves}. The last reason: {reason}"
            )


@dataclass
class _Save:
    """A checkpoint that a thread of each rank is writing."""

    unfinished: Path
    point: RunPoint
    layout: Layout
    pending: PendingSave
    rank: int
    steps: tuple[TrainBatch, ...]  # not yet taken
    random: dict[str, torch.Tensor]
    thread: threading.Thread = field(init=False)
    sums: dict[str, str] = field(default_factory=dict[str, str])  # of the files that this rank wrote
    error: str | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._write, name="write checkpoint", daemon=True)

    def _write(self) -> None:
        try:
            files = self.pending.write()
            name = f"rank_{self.rank:05d}.safetensors"
            save_tensors(self.random, self.unfinished / "rng" / name)
            files.append(self.unfinished / "rng" / name)
            if self.point.keeps_steps:
                write_batches(self.unfinished / "remaining" / name, self.steps)
                files.append(self.unfinished / "remaining" / name)
            checkpoint_folder.sync(files)
            self.sums = checkpoint_folder.sums_of(files, self.unfinished)
        except Exception as error:  # noqa: BLE001 - carried to the main thread, which tells all ranks
            self.error = f"{type(error).__name__}: {error}"


def load(checkpoint: Path, actor: Actor, runtime: Runtime) -> RunPoint:
    """Restore weights, optimizer, schedule and random states; every rank calls this together.

    If the layout has changed since the save, weights and optimizer are resharded, and random states are
    initialised again. They do not affect a run's results while dropout is 0.
    """
    content = _read_state(checkpoint)
    is_moved = is_resharded(content, actor.layout)
    if is_moved:
        require_reshardable(
            checkpoint, content, actor.layout, is_optimizer_distributed=actor.is_optimizer_distributed
        )
    with actor.memory.states_here():
        state = load_sharded(_sharded_state(actor, is_loading=True), checkpoint / WEIGHTS)
        load_model_states(actor.chunks, state)
        optimizer = state["optimizer"]
        if is_moved:
            optimizer = fit_to_chain(optimizer, len(actor.optimizer.chained_optimizers))
        for member in _members(optimizer):  # a rank that owns no parameter exchanges states with the others too
            if "param_state_sharding_type" in member:
                member.setdefault("param_state", {})
        actor.optimizer.load_state_dict(optimizer)
    own = f"rank_{runtime.rank:05d}.safetensors"
    if not is_moved:
        restore_random_states(load_file(checkpoint / "rng" / own))
    point = RunPoint.from_json(content, lambda: read_batches(checkpoint / "remaining" / own))
    actor.restart_schedule(point.state.step)
    return point


def _read_state(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / STATE
    try:
        content: dict[str, Any] = json.loads(read_patiently(file, file.read_text))
        return content
    except (*ABSENT, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r}). Resume from another checkpoint.") from error


def _members(optimizer: dict[Any, Any]) -> list[dict[Any, Any]]:
    return [optimizer] if "optimizer" in optimizer else list(optimizer.values())


def _sharded_state(actor: Actor, is_loading: bool) -> dict[str, Any]:
    prime_adam_states(actor.optimizer)  # a run may be saved, and loaded, before its first update
    actor.complete_parameters()
    model = model_states(actor.chunks, dict(_MEGATRON_FORMAT))
    whole = model["model"] if len(model) == 1 else model
    optimizer = actor.optimizer.sharded_state_dict(
        whole, is_loading=is_loading, metadata=dict(_MEGATRON_FORMAT)
    )
    return {**model, "optimizer": optimizer}
