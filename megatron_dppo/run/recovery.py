"""Handles training that goes wrong: keeps the batches of skipped steps, and rolls a run back after an alarm."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dppo.actor.observation import Step
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import write_batches
from megatron_dppo.errors import TrainingError
from megatron_dppo.run.checkpoint_policy import CheckpointPolicy
from megatron_dppo.run.logger import Alarm
from megatron_dppo.run.session import RunSession
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


log = logging.getLogger(__name__)


class Rollback:
    """Returns to an earlier checkpoint, at most tracking.max_roll_backs times. All ranks call it together."""

    def __init__(
        self, config: Config, session: RunSession, state: TrainingState, checkpoints: CheckpointPolicy
    ) -> None:
        self._runtime, self._logger = session.runtime, session.logger
        self._state, self._checkpoints = state, checkpoints
        self._limit = config.tracking.max_roll_backs

    def go_back(self, alarm: Alarm) -> None:
        """Restore weights and counters from before the alarm, keep the data cursor, and save.

        The engine still has the abandoned weights, so the caller must push the restored ones.

        Raises:
            TrainingError: There is no checkpoint to return to, or the run was rolled back too often.
        """
        left = self._state.run_state
        here = f"rollout {left.rollout}: {alarm.text} (rows: {alarm.evidence})"
        if left.roll_backs >= self._limit:
            raise TrainingError(
                f"{here}. The run went back {left.roll_backs} times; expected at most "
                f"tracking.max_roll_backs = {self._limit}. Change the settings, and start again from a "
                "checkpoint."
            )
        point = self._checkpoints.load_earlier(alarm.good_until)
        if point is None:
            raise TrainingError(
                f"{here}. Found no checkpoint of at most {alarm.good_until} rollouts to go back to. Lower "
                "checkpoint.every, raise checkpoint.keep_last, or set tracking.alarms = 'log'."
            )
        self._logger.go_back_to(point.metrics_offset, left.rollout - 1)
        restored = replace(
            point.state,
            data_cursor=left.data_cursor,
            weight_version=left.weight_version + 1,
            roll_backs=left.roll_backs + 1,
        )
        self._state.restore(restored, None)
        self._checkpoints.save(point.score)  # otherwise a resume would repeat the same prompts
        if self._runtime.is_main:
            log.warning("went back to %d rollouts; the prompts continue from here", self._state.rollout)
