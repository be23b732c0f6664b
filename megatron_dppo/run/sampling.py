"""Parts of a run that samples: rollouts in turn with training, or ahead of it, and the pushes between."""

from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.rollouts import Rollouts
from megatron_dppo.run.parts import RunParts
from megatron_dppo.types import SampleGroup


class SamplingParts(RunParts):
    """The parts of a run between its phases, and the parts that sample. All ranks call each method together."""

    rollouts: Rollouts

    def sample(self, rollout: int) -> None:
        """Sample a rollout with the current weights, score it, and queue its gradient steps."""
        with self.state.timer.time("rollout"):
            groups, counts = self._next_groups(rollout)
            self.turns.to_trainer()
        metrics = self.logger.describe_rollout(groups, counts)
        groups = with_advantages(groups, self.config.algorithm.normalize_advantage_std)
        self.logger.write_samples(rollout, groups, self.rollouts.tokenizer)
        with self.state.timer.time("batch"):
            steps, report = gradient_steps(
                groups, rollout, self.config, self.actor.data_parallel, routing=self.actor.captured_routing
            )
        metrics |= self.logger.describe_batches(report)
        self.state.queue_rollout(steps, metrics, self.rollouts.settle(self.runtime.all_gather))

    def _next_groups(self, rollout: int) -> tuple[list[SampleGroup], RolloutCounts]:
        """Sample the next rollout, or return a rollout that was sampled ahead once it may be trained on."""
        rollouts, version = self.rollouts, self.state.weight_version
        if not rollouts.is_ahead:
            return self.sampled(lambda: rollouts.next(rollout))
        groups, counts, metrics = self.preemption.run_together(
            lambda is_asked: rollouts.next_ahead(version, self.runtime.all_gather, is_asked)
        )
        self.logger.add_to_rollout(metrics)
        return groups, counts

    def push(self, version: int, num_finished: int = 0) -> dict[str, float]:
        """Pause sampling and push the weights; `num_finished` finished rollouts are not in the state yet.

        Returns:
            Metrics of the push.

        Raises:
            WeightSyncError: The engine did not receive the weights.
            RolloutError: Sampling ahead failed.
        """
        num_left = self.config.run.num_rollouts - self.state.rollout - num_finished
        with self.rollouts.held(version, num_left) as held:
            metrics = self.turns.to_engine(version)
        self.logger.add_to_rollout(held)
        return metrics
