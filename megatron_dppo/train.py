"""The training loop: rollout, reward, advantages, batches, train, sync."""

from contextlib import closing
from typing import Self

from megatron_dppo.actor.actor import Actor
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.engines.weight_sync.factory import WeightSync, build_sync, release_servers
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.run.parts import RunParts, Sampling
from megatron_dppo.run.session import RunSession, start_session


def main(config: Config, *, accepts_changes: bool = False) -> None:
    """Train as configured, in this process of the job; resume from the run's latest checkpoint."""
    with (
        start_session(config, accepts_changes=accepts_changes) as session,
        own_servers(config, session.runtime),
    ):
        training = Training.prepare(config, session)
        with closing(training):
            training.run()


class Training:
    """The training loop. All ranks call each method together; `single_phase` replaces some of its phases."""

    def __init__(self, parts: RunParts, rollouts: Rollouts, sync: WeightSync) -> None:
        """Compose the loop from parts whose state is restored, and give the engine the weights."""
        self.parts, self.rollouts, self._sync = parts, rollouts, sync
        self.actor, self.state = parts.actor, parts.state
        self.sampling = Sampling(parts, rollouts)
        if self.state.open_rollout is None:  # otherwise the engine gets the weights after the open rollout
            self.sampling.push(self.state.weight_version)

    @classmethod
    def prepare(cls, config: Config, session: RunSession) -> Self:
        """Load prompts, engine and model, and resume from the latest checkpoint."""
        runtime, folder = session.runtime, hf_files(config.model.load)
        release_servers(config, runtime)  # they started with all their memory
        engine = build_engine(config, folder, runtime.device)
        rollouts = Rollouts(config, folder, engine, share=(runtime.rank, runtime.world_size))
        actor = Actor(config, runtime)
        sync = build_sync(config, actor, engine, runtime)
        parts = RunParts(config, session, actor, sync)
        parts.checkpoints.resume(rollouts.cursor, rollouts.prompts_digest)
        rollouts.seek(parts.state.run_state.data_cursor)
        return cls(parts, rollouts, sync)

    def run(self) -> None:
        """Roll out and train until the last rollout."""
        while True:
            if self.state.open_rollout is None:
                self.evaluate()
                self.parts.save_if_due()
                if self.state.is_over:
                    break
                self.roll_out()
            take_steps(self.parts)
            self.sync()
        self.parts.checkpoints.wait()

    def evaluate(self) -> None:
        """Evaluate the policy if an evaluation is due."""
        rollout, logger = self.state.rollout, self.parts.logger
        if self.state.is_evaluation_due:
            with (timer := self.state.restart_timer()).time("evaluation"):
                found = self.sampling.in_turn(lambda: self.rollouts.evaluate(rollout, logger.evaluations))
            logger.write_evaluation(rollout, *found, timer.seconds["evaluation"])
            self.state.finish_evaluation()

    def roll_out(self) -> None:
        """Sample rollouts until `rollout.lag` rollouts wait after the next one, and open the next one."""
        self.state.restart_timer()
        while (number := self.state.next_to_sample) is not None:
            self.sampling.sample(number)
        self.parts.begin_rollout()

    def sync(self) -> None:
        """Push the new weights to the engine, and finish the rollout; an alarm may roll the run back."""
        version = self.state.weight_version + 1
        with self.state.timer.time("sync"):
            sync_metrics = self.sampling.push(version, num_finished=1)
        alarm = self.parts.finish_rollout(version, sync_metrics)
        if alarm is not None:
            self.parts.rollback.go_back(alarm)
            self.rollouts.seek(self.state.run_state.data_cursor)  # drop groups of the weights rolled back
            self.sampling.push(self.state.weight_version)

    def close(self) -> None:
        """End sampling, and close the connection to the engine."""
        with closing(self.rollouts), closing(self._sync):
            pass


def take_steps(parts: RunParts) -> None:
    """Take the remaining gradient steps of the open rollout; save between them if a checkpoint is due."""
    while (opened := parts.state.open_rollout) is not None and opened.num_steps:
        with parts.state.timer.time("train"):
            step = parts.actor.train_step(
                parts.state.steps[0],
                is_first=opened.num_done == 0,
                weight_version=parts.state.weight_version,
                lists_clipped=parts.state.lists_clipped_tokens,
            )
        parts.finish_step(opened, step)
        if opened.num_steps > 1:
            parts.save_if_due()
