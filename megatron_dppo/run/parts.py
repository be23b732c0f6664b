"""The parts of a run between the phases of the loop, which all ranks call together."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from megatron_dppo.actor.actor import Actor
from megatron_dppo.actor.observation import Step
from megatron_dppo.actor.reference import ReferencePolicy
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.engines.weight_sync.factory import WeightSync
from megatron_dppo.rollout.rollouts import Rollouts
from megatron_dppo.run.logger import Alarm
from megatron_dppo.run.preemption import Preemption
from megatron_dppo.run.recovery import BadSteps, CheckpointPolicy, Rollback
from megatron_dppo.run.session import RunSession
from megatron_dppo.run.state import TrainingState
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import OpenRollout

T = TypeVar("T")


class RunParts:
    """The parts of every run: actor, state, checkpoints, stop signals, skipped steps and rollback."""

    def __init__(self, config: Config, session: RunSession, actor: Actor, sync: WeightSync | None) -> None:
        """Create the parts; `checkpoints.resume` comes next. `sync` is None in a run without an engine."""
        self.config, self.actor = config, actor
        self.runtime, self.logger = session.runtime, session.logger
        self.reference = ReferencePolicy(actor, config) if actor.objective.ref_kl_coef != 0 else None
        self.state, self.turns = TrainingState(config, self.runtime), Turns(actor, sync, session.runtime)
        self.checkpoints = CheckpointPolicy(config, session, actor, self.state, self.turns.to_trainer)
        self.preemption = Preemption(session.stop_requests, self.runtime, self.checkpoints.save_before_exit)
        self.bad_steps = BadSteps(config, self.runtime, self.state, self.checkpoints)
        self.rollback = Rollback(config, session, self.state, self.checkpoints)

    def save_if_due(self) -> None:
        """Save if a checkpoint is due; save and end the run if any rank has received a stop signal."""
        self.preemption.exit_if_requested()
        self.checkpoints.save_if_due()

    def begin_rollout(self) -> None:
        """Open the oldest queued rollout, and compute log-probs of policy and reference for its steps."""
        self.turns.to_trainer()  # needed if nothing was sampled before
        sampled, state = self.state.queue[0], self.state
        steps = list(state.steps[: sampled.num_steps])
        self.logger.begin_row(sampled, steps, state.weight_version)
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
        """Log and count a gradient step on the first batch of the open rollout; keep a bad step's."""
        step.metrics.add_max("drift/mini_step", opened.num_done)
        self.logger.write_step(self.state.rollout, self.state.step, step.metrics)
        if step.lists is not None:
            self.logger.write_token_lists(self.state.rollout, self.state.step, step.lists)
        if step.is_skipped:
            self.bad_steps.keep(self.state.steps[0], step)
        self.state.finish_step(step.is_skipped)

    def finish_rollout(self, weight_version: int, sync_metrics: Mapping[str, float]) -> Alarm | None:
        """Log the rollout's row and count it; the engine has weights of this version.

        Returns:
            Alarm that requires a rollback, if any.
        """
        self.logger.add_values(sync_metrics)
        if self.state.run_state.roll_backs:
            self.logger.add_values({"alarms/roll_backs": self.state.run_state.roll_backs})
        alarm = self.logger.write_rollout(self.state.rollout, self.state.timer.stop())
        self.state.finish_rollout(weight_version)
        return alarm


class Sampling:
    """Samples rollouts in turn with training, or ahead of it, and pushes the weights between them."""

    def __init__(self, parts: RunParts, rollouts: Rollouts) -> None:
        """Use the rollouts and the engine of a run."""
        self._parts, self.rollouts = parts, rollouts

    def sample(self, rollout: int) -> None:
        """Sample a rollout with the current weights, score it, and queue its gradient steps."""
        parts, state, rollouts = self._parts, self._parts.state, self.rollouts
        with state.timer.time("rollout"):
            version, all_gather = state.weight_version, parts.runtime.all_gather
            parts.turns.require_engine(version)
            groups, counts, of_staleness = parts.preemption.run_together(
                lambda run_unless_asked: rollouts.next(rollout, version, all_gather, run_unless_asked)
            )
            parts.turns.to_trainer()
        parts.logger.add_to_rollout(of_staleness)
        metrics = parts.logger.describe_rollout(groups, counts)
        groups = with_advantages(groups, parts.config.algorithm.normalize_advantage_std)
        parts.logger.write_samples(rollout, groups, rollouts.tokenizer)
        with state.timer.time("batch"):
            steps, report = gradient_steps(
                groups,
                rollout,
                parts.config,
                parts.actor.data_parallel,
                routing=parts.actor.captured_routing,
                shares_prefixes=parts.actor.shares_prefixes,
            )
        metrics |= parts.logger.describe_batches(report)
        state.queue_rollout(steps, metrics, rollouts.cursor)

    def in_turn(self, work: Callable[[], T]) -> T:
        """Run `work`, which samples, in the engine's turn with the current weights, and return its result."""
        self._parts.turns.require_engine(self._parts.state.weight_version)
        return self._parts.preemption.run_interruptible(work)

    def push(self, version: int, num_finished: int = 0) -> dict[str, float]:
        """Pause sampling and push the weights; `num_finished` finished rollouts are not in the state yet.

        Returns:
            Metrics of the push.
        """
        parts = self._parts
        num_left = parts.config.run.num_rollouts - parts.state.run_state.rollout - num_finished
        with self.rollouts.pause(version, num_left) as held:
            metrics = parts.turns.to_engine(version)
        parts.logger.add_to_rollout(held)
        return metrics


class Turns:
    """Lets trainer and engine take turns on the GPU, in the order that `runtime.gpu_ledger` documents.

    If the engine has its own GPU, nothing is offloaded.
    """

    def __init__(self, actor: Actor, sync: WeightSync | None, runtime: Runtime) -> None:
        """Start with the trainer's turn. `sync` is None without an engine: the trainer has every turn."""
        self._actor, self._sync, self._ledger = actor, sync, runtime.gpu_ledger

    def to_engine(self, version: int) -> dict[str, float]:
        """Push the trainer's weights, give the engine the turn, and return metrics of the push."""
        assert self._sync is not None, "weights are pushed to an engine"
        self.to_trainer()
        self._sync.prepare_push()
        if self._ledger.takes_turns:
            self._actor.complete_parameters()
            self._actor.memory.leave()
        return self._sync.push(version)

    def require_engine(self, version: int) -> None:
        """Give the engine the turn, with the current weights, unless it already has the turn."""
        if self._ledger.takes_turns and not self._ledger.holds("engine cache"):
            self.to_engine(version)

    def to_trainer(self) -> None:
        """Give the trainer the turn, unless it has it; the engine needs a push before it samples again."""
        if self._actor.memory.is_away:
            assert self._sync is not None, "the trainer leaves for an engine"
            self._sync.release_engine()
            self._actor.memory.reload()
