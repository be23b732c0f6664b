"""Checkpoints of a run: whole or not there, and enough to go on bit for bit.

A folder per gradient step holds `megatron/` (weights and optimizer), `rng/` (one file per rank), `hf/`
(config and tokenizer, so that `model.load` and the tools read it) and `state.json` (where the run stands).
It is written under another name and renamed when complete; `latest`, a one-line file, is flipped last.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file

from megatron_dppo.actor.actor import Actor
from megatron_dppo.actor.mcore_fixes import prime_adam_states
from megatron_dppo.errors import CheckpointError
from megatron_dppo.models.hf_checkpoint import copy_model_files
from megatron_dppo.models.megatron_checkpoint import HF, WEIGHTS, hf_files, load_sharded, save_sharded
from megatron_dppo.runtime import Runtime
from megatron_dppo.types import RunState

LATEST = "latest"
_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says besides tensors."""

    state: RunState
    metrics_offset: int  # bytes of metrics.jsonl that belong to the steps taken
    world_size: int


def save(folder: Path, actor: Actor, saved: SavedRun, model_folder: Path, runtime: Runtime) -> Path:
    """Write a checkpoint of the run as it stands; every rank calls this together.

    Args:
        folder: The run's `checkpoints/`.
        actor: What to save.
        saved: Where the run stands.
        model_folder: The `model.load` folder, whose config and tokenizer are copied.
        runtime: This process.

    Returns:
        The new checkpoint's folder.
    """
    final = folder / f"step_{saved.state.step:08d}"
    unfinished = folder / f".{final.name}.unfinished"

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / WEIGHTS).mkdir(parents=True)
        (unfinished / "rng").mkdir()

    def finish() -> None:
        copy_model_files(hf_files(model_folder), unfinished / HF)
        (unfinished / "state.json").write_text(json.dumps(asdict(saved), indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        pointer = folder / f".{LATEST}.unfinished"
        pointer.write_text(final.name + "\n")
        pointer.replace(folder / LATEST)

    runtime.on_main(begin)
    save_sharded(_sharded_state(actor, is_loading=False), unfinished / WEIGHTS)
    save_file(_random_states(), unfinished / "rng" / f"rank_{runtime.rank:05d}.safetensors")
    runtime.barrier()
    runtime.on_main(finish)
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run's `checkpoints/`; none before the first.

    Raises:
        CheckpointError: `latest` names a checkpoint that is not there.
    """
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    found = folder / pointer.read_text().strip()
    if not (found / "state.json").is_file():
        raise CheckpointError(
            f"{pointer} names {found.name}, which is not a complete checkpoint. "
            f"Write the name of one that is into {pointer}, or remove it to start anew."
        )
    return found


def read_saved_run(checkpoint: Path) -> SavedRun:
    """Where the run stood when the checkpoint was written.

    Raises:
        CheckpointError: The checkpoint's state is torn.
    """
    try:
        content = json.loads((checkpoint / "state.json").read_text())
        return SavedRun(RunState(**content["state"]), content["metrics_offset"], content["world_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint}/state.json cannot be read ({error!r}). Resume from another checkpoint."
        ) from error


def load(checkpoint: Path, actor: Actor, runtime: Runtime) -> SavedRun:
    """Restore weights, optimizer, schedule and random states; every rank calls this together.

    Raises:
        CheckpointError: It is torn, of another model, or of another number of processes.
    """
    saved = read_saved_run(checkpoint)
    if saved.world_size != runtime.world_size:
        raise CheckpointError(
            f"{checkpoint} was written by {saved.world_size} processes; this run has {runtime.world_size}. "
            f"Start {saved.world_size}, or train from its weights alone: model.load = {str(checkpoint)!r}."
        )
    prime_adam_states(actor.optimizer)
    state = load_sharded(_sharded_state(actor, is_loading=True), checkpoint / WEIGHTS)
    actor.model.load_state_dict(state["model"])
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.restart_schedule(saved.state.step)
    _restore_random_states(load_file(checkpoint / "rng" / f"rank_{runtime.rank:05d}.safetensors"))
    return saved


def _sharded_state(actor: Actor, is_loading: bool) -> dict[str, Any]:
    model = actor.model.sharded_state_dict(metadata=dict(_FORMAT))
    optimizer = actor.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=dict(_FORMAT))
    return {"model": model, "optimizer": optimizer}


def _tracker() -> Any:
    """Megatron's random-number tracker, which `initialize_groups` has made."""
    return get_cuda_rng_tracker()


def _random_states() -> dict[str, torch.Tensor]:
    trackers = {f"megatron.{name}": state for name, state in _tracker().get_states().items()}
    return {"torch": torch.get_rng_state()} | {name: state.clone() for name, state in trackers.items()}


def _restore_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states.pop("torch"))
    _tracker().set_states({name.removeprefix("megatron."): state for name, state in states.items()})
