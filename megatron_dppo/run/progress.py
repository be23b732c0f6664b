"""Training state between gradient steps, with the checkpoint, stop and rollback policy."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from megatron_dppo.actor.actor import Actor, Step
from megatron_dppo.config.load import dump_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import CheckpointError, TrainingError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.run.checkpoints import Checkpoints, RunPoint
from megatron_dppo.run.logger import Alarm, Journal
from megatron_dppo.run.preemption import Preempted, StopRequests
from megatron_dppo.runtime.process import Runtime, Stopwatch
from megatron_dppo.types import DataCursor, OpenRollout, RunState, TrainBatch

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Course:
    """The run's state, its open rollout, and its checkpoints. Every rank calls each method, together."""

    def __init__(
        self, config: Config, runtime: Runtime, journal: Journal, actor: Actor, requests: StopRequests
    ) -> None:
        """Find out which checkpoints there are; call `resume` next."""
        self._config, self._runtime, self._journal = config, runtime, journal
        self._actor, self._requests = actor, requests
        self._settings = dump_config(config)
        folder = config.run.folder / "checkpoints"
        self._checkpoints = Checkpoints(folder, config.checkpoint, config.model.load, runtime)
        self.state = RunState(0, 0, 0, {})
        self.opened: OpenRollout | None = None
        self.watch = Stopwatch(runtime)

    def resume(self, data_cursor: DataCursor, prompts_digest: str) -> None:
        """Stand where the latest whole checkpoint stood, or at the beginning with this cursor.

        Raises:
            CheckpointError: There are checkpoints and none can serve, or the prompts are not those of the run.
        """
        self._prompts_digest = prompts_digest
        point = self._checkpoints.resume(self._actor)
        if point is None:
            point = RunPoint(
                replace(self.state, data_cursor=data_cursor), 0, prompts_digest, config=self._settings
            )
        elif point.prompts_digest != prompts_digest:
            raise CheckpointError(
                f"data.prompts: {self._config.data.prompts} changed since the run was saved, so its place in "
                "the prompts is lost. Restore the file, or start a new run.folder from a checkpoint's weights."
            )
        self.state, self.opened = point.state, point.opened
        self._move()
        self._journal.start_at(point.metrics_offset, self.opened.metrics if self.opened else {})
        self._journal.write_changes(self.state.rollout, point.config)
        if self.is_over and self._runtime.is_main:
            logger.info(
                "%d rollouts are done, run.num_rollouts = %d: there is nothing left to train",
                self.state.rollout,
                self._config.run.num_rollouts,
            )
        if self.opened is not None:
            self.watch = Stopwatch.resumed(self._runtime, self.opened.seconds)

    @property
    def is_over(self) -> bool:
        """Whether all rollouts are finished."""
        return self.state.rollout >= self._config.run.num_rollouts

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the policy as it stands is to be evaluated, and was not yet."""
        options, done = self._config.evaluation, self.state.rollout
        is_due = bool(options.sets) and (done % options.every == 0 or self.is_over)
        return is_due and self.state.last_evaluation != done

    @property
    def is_paired_forward_due(self) -> bool:
        """Whether this rollout's first mini-batch is to be forwarded with live and with replayed routes."""
        every = self._config.tracking.paired_routing_every
        return every > 0 and self.state.rollout % every == 0

    @property
    def lists_clipped_tokens(self) -> bool:
        """Whether the gradient steps of this rollout list the tokens that are masked."""
        every = self._config.tracking.clipped_tokens_every
        return every > 0 and self.state.rollout % every == 0

    def unless_asked_to_stop(self, work: Callable[[], T]) -> T:
        """What `work` returns; left at once, and the run saved and ended, where any rank is asked to stop.

        The work samples: it communicates with no other rank, and is done again after a resume.
        """
        is_released = self._config.rollout.release_trainer
        with self._actor.memory.released() if is_released else contextlib.nullcontext():
            result = self._requests.run_unless_asked(work)
        if self._runtime.any(result is None):
            self._save_and_end()
        assert result is not None, "only a request to stop leaves the work undone"
        return result

    def open_rollout(self, steps: Sequence[TrainBatch], data_cursor: DataCursor) -> None:
        """A rollout was sampled; what is to be trained on it is `steps`."""
        self._move(data_cursor=data_cursor)
        self.opened = OpenRollout(tuple(steps), num_done=0, metrics={}, seconds={})

    def count_step(self, step: Step) -> None:
        """A gradient step was taken, or skipped; saves where that is due in the middle of a rollout.

        Raises:
            TrainingError: Too many steps in a row were skipped.
        """
        assert self.opened is not None, "steps are taken on a rollout"
        batch, *rest = self.opened.steps
        skipped = self.state.skipped_in_a_row + 1 if step.is_skipped else 0
        step.metrics.add_max("drift/mini_step", self.opened.num_done)
        self._journal.write_step(self.state.rollout, self.state.step, step.metrics)
        if step.lists is not None:
            self._journal.write_token_lists(self.state.rollout, self.state.step, step.lists)
        if step.is_skipped:
            try:
                self._journal.keep_evidence(self.state.step, batch, step, skipped)
            except TrainingError:  # raised on every rank, so that they can still complete what is being saved
                with contextlib.suppress(CheckpointError):
                    self._checkpoints.complete()
                raise
        self._move(step=self.state.step + 1, skipped_in_a_row=skipped)
        self.opened = replace(self.opened, steps=tuple(rest), num_done=self.opened.num_done + 1)
        if rest:
            self.save_if_due()

    def close_rollout(self, weight_version: int, pushed: Mapping[str, float]) -> bool:
        """All steps were taken, and the engine holds the new weights; `pushed` are the metrics of that.

        Returns:
            Whether the run went back to an earlier checkpoint, whose weights the engine does not hold.

        Raises:
            TrainingError: The rollout raised an alarm that ends the run, or that there is no way back from.
        """
        self._journal.add_values(pushed)
        if self.state.roll_backs:
            self._journal.add_values({"alarms/roll_backs": self.state.roll_backs})
        alarm = self._journal.write_rollout(self.state.rollout, self.watch.stop())
        self._move(rollout=self.state.rollout + 1, weight_version=weight_version)
        self.opened = None
        if alarm is not None:
            self._go_back(alarm)
        return alarm is not None

    def _go_back(self, alarm: Alarm) -> None:
        """Go on from before the trouble, with the next prompts; what a resume finds is the same."""
        left, limit = self.state, self._config.tracking.max_roll_backs
        here = f"rollout {left.rollout - 1}: {alarm.text} (rows: {alarm.evidence})"
        if left.roll_backs >= limit:
            raise TrainingError(
                f"{here}. The run went back {left.roll_backs} times; expected at most "
                f"tracking.max_roll_backs = {limit}. Change the settings, and start again from a checkpoint."
            )
        point = self._checkpoints.go_back(self._actor, alarm.good_until)
        if point is None:
            raise TrainingError(
                f"{here}. Found no checkpoint of at most {alarm.good_until} rollouts to go back to. Lower "
                "checkpoint.every, raise checkpoint.keep_last, or set tracking.alarms = 'log'."
            )
        self._journal.go_back_to(point.metrics_offset, left.rollout - 1)
        self.state = replace(point.state, roll_backs=left.roll_backs)
        self._move(
            data_cursor=left.data_cursor,
            weight_version=left.weight_version + 1,
            roll_backs=left.roll_backs + 1,
        )
        self._save(point.score)  # or a resume would meet the same prompts
        if self._runtime.is_main:
            done = self.state.rollout
            logger.warning("went back to %d rollouts; the prompts go on where they are", done)

    def count_evaluation(self) -> None:
        """The policy as it stands was evaluated."""
        self._move(last_evaluation=self.state.rollout)

    def save_if_due(self) -> None:
        """Save where the config says so; save and end the run where any rank was asked to stop.

        Raises:
            Preempted: The run was asked to stop, and has saved.
            CheckpointError: Saving failed too often.
        """
        if self._runtime.any(self._requests.is_received):
            self._save_and_end()
        if self._is_save_due():
            self._save()
        self._checkpoints.poll()

    def finish(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            CheckpointError: It could not be written.
        """
        self._checkpoints.wait()

    def _move(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._runtime.progress.rollout, self._runtime.progress.step = self.state.rollout, self.state.step

    def _is_save_due(self) -> bool:
        options, state = self._config.checkpoint, self.state
        is_due = options.every_steps > 0 and state.step > 0 and state.step % options.every_steps == 0
        if self.opened is None and state.rollout > 0:
            is_due |= self.is_over or (options.every > 0 and state.rollout % options.every == 0)
        return is_due

    def _save(self, score: float | None = None) -> None:
        opened = self.opened
        if opened is None and score is None:
            score = self._journal.latest(self._config.checkpoint.best_metric)
        elif opened is not None:
            metrics, seconds = self._journal.rollout_metrics, self.watch.stop()
            opened = replace(opened, metrics=metrics, seconds=seconds)
        offset = self._journal.offset()
        point = RunPoint(self.state, offset, self._prompts_digest, opened, score, self._settings)
        pause = Metrics()
        pause.add_max("time/save_s", self._checkpoints.save(self._actor, point))
        self._journal.add_to_rollout(pause)

    def _save_and_end(self) -> None:
        self._save()
        self._checkpoints.wait()
        if self._runtime.is_main:
            state = self.state
            logger.info("asked to stop: saved after %d rollouts, %d gradient steps", state.rollout, state.step)
        raise Preempted
