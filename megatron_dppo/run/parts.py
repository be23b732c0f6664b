"""Parts of a run that every mode of the loop needs: state, checkpoints, stop signals, bad steps, rollback."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from megatron_dppo.actor.actor import Actor
from megatron_dppo.actor.observation import Step
from megatron_dppo.actor.reference import ReferencePolicy
from megatron_dppo.config.schema import Config
from megatron_dppo.run.bad_steps import BadSteps
from megatron_dppo.run.checkpoint_policy import CheckpointPolicy
from megatron_dppo.run.logger import Alarm
from megatron_dppo.run.preemption import Preemption
from megatron_dppo.run.rollback import Rollback
from megatron_dppo.run.session import Session
from megatron_dppo.run.state import TrainingState
from megatron_dppo.run.turns import Turns
from megatron_dppo.types import OpenRollout

T = TypeVar("T")


class RunParts:
    """The parts of a run between its phases. All ranks call each method together."""

    def __init__(self, config: Config, session: Session, actor: Actor) -> None:
        """Create the parts; `checkpoints.resume` comes next."""
        self.config, self.actor = config, actor
        self.runtime, self.logger = session.runtime, session.logger
        self.reference = ReferencePolicy(actor, config) if actor.objective.ref_kl_coef != 0 else None
        self.state, self.turns = TrainingState(config, self.runtime), Turns(actor, session.runtime)
        self.checkpoints = CheckpointPolicy(config, session, actor, self.state, self.turns)
        self.preemption = Preemption(session.stop_requests, self.runtime, self.checkpoints.save_before_exit)
        self.bad_steps = BadSteps(config, self.runtime, self.state, self.checkpoints)
        self.rollback = Rollback(config, session, self.state, self.checkpoints)

    def save_if_due(self) -> None:
        """Save if a checkpoint is due; save and end the run if any rank has received a stop signal.

        Raises:
            Preempted: A rank received a stop signal, and the run has saved.
            CheckpointError: Saving failed too often.
        """
        self.preemption.exit_if_requested()
        self.checkpoints.save_if_due()

    def sampled(self, work: Callable[[], T]) -> T:
        """Run `work`, which samples, in the engine's turn with the current weights, and return its result.

        Raises:
            Preempted: A rank received a stop signal, and the run has saved.
            WeightSyncError: The engine did not get the weights.
        """
        self.turns.require_engine(self.state.weight_version)
        return self.preemption.run_interruptible(work)

    def begin_rollout(self) -> None:
        """Open the oldest queued rollout, and compute log-probs of policy and reference for its steps."""
        self.turns.to_trainer()  # needed if nothing was sampled before
        sampled, state = self.state.queue[0], self.state
        steps = list(sampled.steps)
        self.logger.begin_row(sampled, state.weight_version)
        if state.is_paired_forward_due and steps:
            with state.timer.time("paired_forward"):
                self.logger.add_to_rollout(self.actor.paired_mismatch(steps[0]))
        if self.actor.objective.anchor == "recomputed":
            with state.timer.time("train"), state.timer.time("anchor"):
                steps = [self.actor.with_old_log_probs(batch) for batch in steps]
        if self.reference is not None and steps:
            with state.timer.time("train"):
                steps = self.reference.with_log_probs(steps)
        self.logger.keep_batches(state.rollout, steps)
        state.begin_rollout(steps)

    def finish_step(self, opened: OpenRollout, step: Step) -> None:
        """Log and count a gradient step on the first batch of the open rollout; keep the batch of a bad step.

        Raises:
            TrainingError: Too many steps in a row were skipped.
        """
        step.metrics.add_max("drift/mini_step", opened.num_done)
        self.logger.write_step(self.state.rollout, self.state.step, step.metrics)
        if step.lists is not None:
            self.logger.write_token_lists(self.state.rollout, self.state.step, step.lists)
        if step.is_skipped:
            self.bad_steps.keep(opened.steps[0], step)
        self.state.finish_step(step.is_skipped)

    def finish_rollout(self, weight_version: int, sync_metrics: Mapping[str, float]) -> Alarm | None:
        """Log the rollout's row and count it; the engine has weights of this version.

        Returns:
            Alarm that requires a rollback, if any.

        Raises:
            TrainingError: The row raises an alarm, and tracking.alarms is "stop".
        """
        self.logger.add_values(sync_metrics)
        if self.state.run_state.roll_backs:
            self.logger.add_values({"alarms/roll_backs": self.state.run_state.roll_backs})
        alarm = self.logger.write_rollout(self.state.rollout, self.state.timer.stop())
        self.state.finish_rollout(weight_version)
        return alarm
