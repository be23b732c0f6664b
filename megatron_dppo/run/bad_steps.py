"""Keeps the batch of each skipped gradient step, and ends a run that skips too many in a row."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.actor.observation import Step
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import write_batches
from megatron_dppo.errors import TrainingError
from megatron_dppo.run.checkpoint_policy import CheckpointPolicy
from megatron_dppo.run.state import TrainingState
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import TrainBatch

MAX_FOLDERS = 10  # a run that fails periodically must not fill the disk


class BadSteps:
    """Handles gradient steps that were skipped because of non-finite values; every rank calls it together."""

    def __init__(
        self, config: Config, runtime: Runtime, state: TrainingState, checkpoints: CheckpointPolicy
    ) -> None:
        self._runtime, self._state, self._checkpoints = runtime, state, checkpoints
        self._folder = config.run.folder / "evidence"
        self._max_skipped_steps = config.optimizer.max_skipped_steps

    def keep(self, batch: TrainBatch, step: Step) -> None:
        """Write this rank's batch and the faults of a skipped step, before the state counts it.

        Raises:
            TrainingError: optimizer.max_skipped_steps in a row were skipped; raised on every rank.
        """
        by_rank = dict(enumerate(self._runtime.all_gather(step.faults)))
        faults = [f"rank {rank}: {fault}" for rank, own in by_rank.items() for fault in own]
        faults = faults or ["Megatron's optimizer skipped the update"]
        number = self._state.step
        write_bad_step(self._folder, number, batch, faults, self._runtime)
        skipped_in_a_row = self._state.run_state.skipped_in_a_row + 1
        if skipped_in_a_row < self._max_skipped_steps:
            return
        self._checkpoints.complete_before_error()
        raise TrainingError(
            f"gradient step {number}: found {skipped_in_a_row} steps in a row that are not finite; "
            f"expected fewer than optimizer.max_skipped_steps = {self._max_skipped_steps}. This one: "
            f"{faults[0]}. {self._folder} holds the batches. Lower optimizer.lr, or resume an earlier "
            "checkpoint with other settings."
        )


def write_bad_step(folder: Path, step: int, batch: TrainBatch, faults: Sequence[str], runtime: Runtime) -> None:
    """Write `step_<n>/faults.json` and each rank's micro-batches; every rank calls this together.

    Only the first `MAX_FOLDERS` steps of a run are kept. `read_batches` reads the micro-batches back.

    Args:
        folder: Folder `evidence/` of the run.
        step: Number of the gradient step.
        batch: Batch of this rank.
        faults: Descriptions of the non-finite values, over all ranks.
        runtime: Runtime of this process.
    """
    target = folder / f"step_{step:08d}"

    def begin() -> bool:
        others = [path for path in folder.glob("step_*") if path != target]
        if len(others) >= MAX_FOLDERS:
            return False
        target.mkdir(parents=True, exist_ok=True)
        (target / "faults.json").write_text(json.dumps(list(faults), indent=1) + "\n")
        return True

    if runtime.on_main(begin):
        write_batches(target / f"rank_{runtime.rank:05d}.safetensors", [batch])
