"""The training loop: rollout, reward, advantages, batches, train, sync."""

from contextlib import closing
from typing import Self

from megatron_dppo.actor.actor import Actor
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.engines.weight_sync.factory import WeightSync, build_sync, release_servers
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.run.sampling import SamplingParts
from megatron_dppo.run.session import Session, start_session


def main(config: Config, *, accepts_changes: bool = False) -> None:
    """Train as configured, in this process of the job; resume from the run's latest checkpoint.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
        Preempted: A signal asked the run to stop, and it has saved.
    """
    with (
        start_session(config, accepts_changes=accepts_changes) as session,
        own_servers(config, session.runtime),
    ):
        training = Training.prepare(config, session)
        with closing(training.rollouts), closing(training.weight_sync):
            training.run()


class Training(SamplingParts):
    """The training loop. The modes of `single_phase` replace some of its phases."""

    weight_sync: WeightSync

    @classmethod
    def prepare(cls, config: Config, session: Session) -> Self:
        """Load prompts, engine and model, and resume from the latest checkpoint."""
        runtime, folder = session.runtime, hf_files(config.model.load)
        release_servers(config, runtime)  # they started with all of their memory
        engine = build_engine(config, folder, runtime.device)
        rollouts = Rollouts(config, folder, engine, share=(runtime.rank, runtime.world_size))
        training = cls(config, session, Actor(config, runtime))
        training.checkpoints.resume(rollouts.cursor, rollouts.prompts_digest)
        rollouts.seek(training.state.run_state.data_cursor)
        training.rollouts, training.weight_sync = rollouts, build_sync(config, training.actor, engine, runtime)
        training.turns.sync = training.weight_sync
        if training.state.open_rollout is None:  # otherwise the engine gets the weights after the open rollout
            training.push(training.state.weight_version)
        return training

    def run(self) -> None:
        """Roll out and train until the last rollout."""
        while True:
            if self.state.open_rollout is None:
                self.evaluate()
                self.save_if_due()
                if self.state.is_over:
                    break
                self.roll_out()
            self.train()
            self.sync()
        self.checkpoints.wait()

    def evaluate(self) -> None:
        """Evaluate the policy if an evaluation is due."""
        rollout, folder = self.state.rollout, self.logger.evaluations
        if self.state.is_evaluation_due:
            with (timer := self.state.restart_timer()).time("evaluation"):
                scores = self.sampled(lambda: self.rollouts.evaluate(rollout, folder))
            self.logger.write_evaluation(rollout, scores, timer.seconds["evaluation"])
            self.state.finish_evaluation()

    def roll_out(self) -> None:
        """Sample rollouts until `rollout.lag` rollouts wait after the next one, and open the next one."""
        self.state.restart_timer()
        while (number := self.state.next_to_sample) is not None:
            self.sample(number)
        self.begin_rollout()

    def train(self) -> None:
        """Take the remaining gradient steps of the open rollout; save between them if a checkpoint is due."""
        while (opened := self.state.open_rollout) is not None and opened.steps:
            with self.state.timer.time("train"):
                step = self.actor.train_step(
                    opened.steps[0],
                    is_first=opened.num_done == 0,
                    weight_version=self.state.weight_version,
                    lists_clipped=self.state.lists_clipped_tokens,
                )
            self.finish_step(opened, step)
            if len(opened.steps) > 1:
                self.save_if_due()

    def sync(self) -> None:
        """Push the new weights to the engine, and finish the rollout; an alarm may roll the run back."""
        version = self.state.weight_version + 1
        with self.state.timer.time("sync"):
            sync_metrics = self.push(version, num_finished=1)
        alarm = self.finish_rollout(version, sync_metrics)
        if alarm is not None:
            self.rollback.go_back(alarm)
            if self.rollouts.is_ahead:  # open groups were sampled with weights that were rolled back
                self.rollouts.seek(self.state.run_state.data_cursor)
            self.push(self.state.weight_version)
