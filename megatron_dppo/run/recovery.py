"""Saves and restores a run's checkpoints as its settings decide, and handles training that goes wrong.

The batches of skipped steps are kept, and an alarm rolls the run back to an earlier checkpoint.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dppo.actor.actor import Actor
from megatron_dppo.actor.observation import Step
from megatron_dppo.config.load import dump_config
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import write_batches
from megatron_dppo.errors import CheckpointError, TrainingError
from megatron_dppo.run.checkpoints import Checkpoints
from megatron_dppo.run.logger import Alarm
from megatron_dppo.run.session import RunSession
from megatron_dppo.run.state import RunPoint, TrainingState
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import DataCursor, TrainBatch

log = logging.getLogger(__name__)
MAX_FOLDERS = 10  # a run that fails periodically must not fill the disk


class CheckpointPolicy:
    """Saves the training state as configured in `[checkpoint]`. All ranks call each method together."""

    def __init__(
        self,
        config: Config,
        session: RunSession,
        actor: Actor,
        state: TrainingState,
        to_trainer: Callable[[], None],
    ) -> None:
        """Find the existing checkpoints; call `resume` next. `to_trainer` gives the trainer the GPU."""
        self._to_trainer, self._stop_requests = to_trainer, session.stop_requests
        self._config, self._runtime, self._logger = config, session.runtime, session.logger
        self._actor, self._state = actor, state
        self._settings = dump_config(config)
        self._is_warned = False
        folder = config.run.folder / "checkpoints"
        self._checkpoints = Checkpoints(folder, config.checkpoint, config.model.load, session.runtime)

    def resume(self, data_cursor: DataCursor, prompts_digest: str) -> None:
        """Restore the latest complete checkpoint, or start at this cursor if there is none."""
        self._prompts_digest = prompts_digest
        point = self._checkpoints.resume(self._actor)
        if point is None:
            begin = replace(self._state.run_state, data_cursor=data_cursor)
            point = RunPoint(begin, 0, prompts_digest, config=self._settings)
        elif point.prompts_digest != prompts_digest:
            names = " and ".join(str(file.path) for file in self._config.data.prompts)
            raise CheckpointError(
                f"data.prompts: {names} changed in "
                "content, name or weight since the run was saved, so its place in the prompts is lost. Restore "
                "the files, or start a new run.folder from a checkpoint's weights."
            )
        self._state.restore(point)
        self._stop_requests.begin()
        self._logger.start_at(point.metrics_offset, point.opened)
        self._logger.write_changes(point.state.rollout, point.config)
        if self._state.is_over and self._runtime.is_main:
            log.info(
                "%d rollouts are done, run.num_rollouts = %d: there is nothing left to train",
                point.state.rollout,
                self._config.run.num_rollouts,
            )

    def save_if_due(self) -> None:
        """Save if a checkpoint is due, and publish an earlier save that all ranks have written."""
        if self._is_due():
            self.save(self._score())
        if self._checkpoints.is_writing:
            started = time.perf_counter()
            self._checkpoints.poll()
            self._count(time.perf_counter() - started)

    def save(self, score: float | None) -> None:
        """Save now, unless this state is saved; `score` is the weights' checkpoint.best_metric, if known."""
        state, opened = self._state, self._state.open_rollout
        if self._checkpoints.holds(state.run_state):
            return
        if opened is not None:
            opened = self._logger.with_row(replace(opened, seconds=state.timer.stop()))
        offset = self._logger.offset()
        digest, settings = self._prompts_digest, self._settings
        point = RunPoint(state.run_state, offset, digest, opened, score, settings, state.queue, state.steps)
        self._to_trainer()
        self._count(self._checkpoints.save(self._actor, point))

    def _count(self, seconds: float) -> None:
        self._logger.add_save_pause(seconds, is_between_rollouts=self._state.open_rollout is None)

    def save_before_exit(self) -> None:
        """Save now, and wait until the checkpoint is on disk."""
        self.save(self._score())
        self._checkpoints.wait()
        if self._runtime.is_main:
            done = self._state.rollout, self._state.step
            log.info("asked to stop: saved after %d rollouts, %d gradient steps", *done)

    def complete_before_error(self) -> None:
        """Complete a save in progress before an error that all ranks raise; ignore a failure of the save."""
        with contextlib.suppress(CheckpointError):
            self._checkpoints.complete()

    def wait(self) -> None:
        """Wait for the last checkpoint."""
        self._checkpoints.wait()

    def load_earlier(self, max_rollouts: int) -> RunPoint | None:
        """Load the newest checkpoint of at most `max_rollouts` rollouts; return None if there is none.

        Weights and optimizer are restored. The training state and the run folder are left to the caller.
        """
        self._to_trainer()
        return self._checkpoints.go_back(self._actor, max_rollouts)

    def _is_due(self) -> bool:
        options, state = self._config.checkpoint, self._state
        is_due = options.every_steps > 0 and state.step > 0 and state.step % options.every_steps == 0
        if state.open_rollout is None and state.rollout > 0:
            is_due |= state.is_over or (options.every > 0 and state.rollout % options.every == 0)
        return is_due

    def _score(self) -> float | None:
        """Return checkpoint.best_metric of the current weights; None in the middle of a rollout."""
        if self._state.open_rollout is not None:
            return None
        options = self._config.checkpoint
        score = self._logger.latest(options.best_metric)
        if score is None and options.keep_best and not self._is_warned:
            self._is_warned = True
            if self._runtime.is_main:
                log.warning(
                    "checkpoint.best_metric: found no finite %r after %d rollouts; expected a metric of the "
                    "rollout's row, or of an evaluation since. checkpoint.keep_best leaves this checkpoint out",
                    options.best_metric,
                    self._state.rollout,
                )
        return score


class BadSteps:
    """Handles gradient steps that were skipped because of non-finite values; every rank calls it together."""

    def __init__(
        self, config: Config, runtime: Runtime, state: TrainingState, checkpoints: CheckpointPolicy
    ) -> None:
        self._runtime, self._state, self._checkpoints = runtime, state, checkpoints
        self._folder = config.run.folder / "evidence"
        self._max_skipped_steps = config.optimizer.max_skipped_steps

    def keep(self, batch: TrainBatch, step: Step) -> None:
        """Write this rank's batch and the faults of a skipped step, before the state counts it."""
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
        self._state.restore(replace(point, state=restored, opened=None, queue=(), steps=()))
        self._checkpoints.save(point.score)  # otherwise a resume would repeat the same prompts
        if self._runtime.is_main:
            log.warning("went back to %d rollouts; the prompts continue from here", self._state.rollout)
