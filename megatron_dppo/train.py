"""The loop: prompts, rollout, reward, advantages, batches, train, sync."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.actor import checkpoint
from megatron_dppo.actor.actor import Actor
from megatron_dppo.checks import require_valid
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches import gradient_steps, with_advantages
from megatron_dppo.journal import Journal
from megatron_dppo.models.megatron_checkpoint import hf_files
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.runtime import Runtime, Stopwatch, start, stop
from megatron_dppo.types import RunState, TrainBatch
from megatron_dppo.weight_sync.in_process import InProcessSync

logger = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Train as `config` says, in this process of the job; goes on from the run's latest checkpoint.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
    """
    runtime = start(config.run.num_threads)
    try:
        require_valid(config, runtime.world_size)
        with Journal.open(config, runtime) as journal:
            Training.prepare(config, runtime, journal).run()
    finally:
        stop()


@dataclass
class Training:
    """Everything that lives as long as the run."""

    config: Config
    runtime: Runtime
    journal: Journal
    actor: Actor
    rollouts: Rollouts
    sync: InProcessSync
    state: RunState

    @classmethod
    def prepare(cls, config: Config, runtime: Runtime, journal: Journal) -> "Training":
        """Load model, engine and prompts, and stand where the latest checkpoint stood."""
        actor, folder = Actor(config, runtime), hf_files(config.model.load)
        engine = build_engine(config, folder, runtime.device)
        rollouts = Rollouts(config, folder, engine, actor.routing, share=actor.data_parallel_share)
        sync = InProcessSync(actor.weights, engine, runtime)
        state, metrics_offset = RunState(0, 0, 0, rollouts.cursor), 0
        resumed = journal.checkpoint_to_resume()
        if resumed is not None:
            saved = checkpoint.load(resumed, actor, runtime)
            state, metrics_offset = saved.state, saved.metrics_offset
            rollouts.seek(state.data_cursor)
            logger.info("resuming from %s: %d rollouts are done", resumed, state.rollout)
        journal.start_at(metrics_offset)
        sync.push(state.weight_version)
        return cls(config, runtime, journal, actor, rollouts, sync, state)

    def run(self) -> None:
        """Roll out and train until the last rollout."""
        last = self.config.run.num_rollouts
        for rollout in range(self.state.rollout, last):
            self._evaluate_if_due(rollout)
            self._one_rollout(rollout)
            every = self.config.checkpoint.every
            if rollout + 1 == last or (every and (rollout + 1) % every == 0):
                saved = checkpoint.SavedRun(self.state, self.journal.offset(), self.runtime.world_size)
                checkpoints = self.config.run.folder / "checkpoints"
                checkpoint.save(checkpoints, self.actor, saved, self.config.model.load, self.runtime)
        self._evaluate_if_due(last)

    def _one_rollout(self, rollout: int) -> None:
        watch = Stopwatch(self.runtime)
        with watch.time("rollout"):
            batch = self.rollouts.next(rollout)
        self.journal.check_drops(batch.counts)
        groups = with_advantages(batch.groups, self.config.algorithm.normalize_advantage_std)
        self.journal.write_samples(rollout, replace(batch, groups=tuple(groups)), self.rollouts.tokenizer)
        is_routed = self.config.rollout.routing_replay != "off"
        with watch.time("batch"):
            steps = gradient_steps(
                groups,
                rollout,
                self.config,
                routing=self.actor.routing if is_routed else None,
                rank=self.actor.data_parallel_share[0],
                all_gather=self.runtime.all_gather,
            )
        paired_every = self.config.tracking.paired_routing_every
        if paired_every and rollout % paired_every == 0 and steps:
            with watch.time("paired_forward"):
                self.journal.add_to_rollout(self.actor.paired_mismatch(steps[0]))
        with watch.time("train"):
            self._train(rollout, steps)
        version = self.state.weight_version + 1
        with watch.time("sync"):
            self.sync.push(version)
        self.state = RunState(rollout + 1, self.state.step + len(steps), version, self.rollouts.cursor)
        self.journal.write_rollout(rollout, groups, watch.stop())

    def _train(self, rollout: int, steps: Sequence[TrainBatch]) -> None:
        if self.actor.objective.anchor == "recomputed":
            steps = [self.actor.with_old_log_probs(batch) for batch in steps]
        for index, batch in enumerate(steps):
            metrics = self.actor.train_step(batch, is_first=index == 0)
            self.journal.write_step(rollout, self.state.step + index, metrics)

    def _evaluate_if_due(self, rollout: int) -> None:
        options = self.config.evaluation
        is_last = rollout == self.config.run.num_rollouts
        if options.prompts is not None and (rollout % options.every == 0 or is_last):
            self.journal.write_evaluation(rollout, *self.rollouts.evaluate(rollout))
