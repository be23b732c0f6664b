"""The loop: prompts, rollout, reward, advantages, batches, train, sync."""

from contextlib import closing
from dataclasses import dataclass, replace

from megatron_dppo.actor.actor import Actor
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.models.megatron_folder import hf_files
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.rollout.sglang.own_servers import own_servers
from megatron_dppo.run.logger import Journal
from megatron_dppo.run.progress import Course
from megatron_dppo.run.session import Job, joined
from megatron_dppo.runtime.process import Runtime, Stopwatch
from megatron_dppo.weight_sync.factory import WeightSync, build_sync


def main(config: Config, *, accepts_changes: bool = False) -> None:
    """Train as `config` says, in this process of the job; resumes from the run's latest checkpoint.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
        Preempted: A signal asked the run to stop, and it has saved.
    """
    with joined(config, accepts_changes=accepts_changes) as job, own_servers(config, job.runtime):
        training = Training.prepare(config, job)
        with closing(training.rollouts), closing(training.sync):
            training.run()


@dataclass
class Training:
    """Everything that lives as long as the run."""

    config: Config
    runtime: Runtime
    journal: Journal
    actor: Actor
    rollouts: Rollouts
    sync: WeightSync
    course: Course

    @classmethod
    def prepare(cls, config: Config, job: Job) -> "Training":
        """Load prompts, engine and model, and stand where the latest checkpoint stood."""
        runtime, journal, folder = job.runtime, job.journal, hf_files(config.model.load)
        engine = build_engine(config, folder, runtime.device)
        rollouts = Rollouts(config, folder, engine, share=(runtime.rank, runtime.world_size))
        actor = Actor(config, runtime)
        course = Course(config, runtime, journal, actor, job.requests)
        course.resume(rollouts.cursor, rollouts.prompts_digest)
        rollouts.seek(course.state.data_cursor)
        sync = build_sync(config, actor, engine, runtime)
        if course.opened is None:  # nothing is sampled before an open rollout is closed, and weights pushed
            sync.push(course.state.weight_version)
        return cls(config, runtime, journal, actor, rollouts, sync, course)

    def run(self) -> None:
        """Roll out and train until the last rollout."""
        while True:
            if self.course.opened is None:
                self._evaluate_if_due()
                self.course.save_if_due()
                if self.course.is_over:
                    break
                self.roll_out()
            self._train()
            self._sync()
        self.course.finish()

    def roll_out(self) -> None:
        """Sample the next rollout, and make its gradient steps."""
        rollout, watch = self.course.state.rollout, Stopwatch(self.runtime)
        self.course.watch = watch
        with watch.time("rollout"):
            batch = self.course.unless_asked_to_stop(lambda: self.rollouts.next(rollout))
            self.sync.release_engine()
        self.journal.describe_rollout(batch)
        groups = with_advantages(batch.groups, self.config.algorithm.normalize_advantage_std)
        self.journal.write_samples(rollout, replace(batch, groups=tuple(groups)), self.rollouts.tokenizer)
        del batch  # its samples are freed as they are packed, or sent to those who train on them
        with watch.time("batch"):
            steps, report = gradient_steps(
                groups, rollout, self.config, self.actor.data_parallel, routing=self.actor.captured_routing
            )
        self.journal.describe_batches(report)
        if self.course.is_paired_forward_due and steps:
            with watch.time("paired_forward"):
                self.journal.add_to_rollout(self.actor.paired_mismatch(steps[0]))
        if self.actor.objective.anchor == "recomputed":
            with watch.time("train"):
                steps = [self.actor.with_old_log_probs(batch) for batch in steps]
        self.journal.keep_batches(rollout, steps)
        self.course.open_rollout(steps, self.rollouts.settle(self.runtime.all_gather))

    def _train(self) -> None:
        while self.course.opened is not None and self.course.opened.steps:
            with self.course.watch.time("train"):
                opened, version = self.course.opened, self.course.state.weight_version
                lists = self.course.lists_clipped_tokens
                step = self.actor.train_step(
                    opened.steps[0], is_first=opened.num_done == 0, weight_version=version, lists_clipped=lists
                )
            self.course.count_step(step)

    def _sync(self) -> None:
        version = self.course.state.weight_version + 1
        with self.course.watch.time("sync"):
            pushed = self.sync.push(version)
        if self.course.close_rollout(version, pushed):  # it went back: the engine holds what it left
            self.sync.push(self.course.state.weight_version)

    def _evaluate_if_due(self) -> None:
        if self.course.is_evaluation_due:
            rollout = self.course.state.rollout
            folder = self.journal.evaluations
            scores = self.course.unless_asked_to_stop(lambda: self.rollouts.evaluate(rollout, folder))
            self.journal.write_evaluation(rollout, scores)
            self.course.count_evaluation()
