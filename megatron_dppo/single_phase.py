"""Runs one phase of the loop alone, for debugging: rollouts that are kept, or training on kept ones."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from megatron_dppo.actor.actor import Actor
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import read_batches, write_batches
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.rollout.sglang.own_servers import own_servers
from megatron_dppo.run.progress import Course
from megatron_dppo.run.session import Job, joined
from megatron_dppo.train import Training
from megatron_dppo.types import TrainBatch

_METRICS = "metrics.json"


def roll_out_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Sample all rollouts of a run with its first weights, and keep their gradient steps in `folder`.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
    """
    _refuse_to_go_back(config)
    with joined(config, accepts_changes=accepts_changes) as job, own_servers(config, job.runtime):
        training = Training.prepare(config, job)
        with closing(training.rollouts), closing(training.sync):
            course = training.course
            while not course.is_over:
                if course.opened is None:
                    training.roll_out()
                assert course.opened is not None
                _keep(folder / f"rollout_{course.state.rollout:06d}", course.opened.steps, job)
                course.close_rollout(course.state.weight_version, {})


def train_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Train on the rollouts in `folder`, in the layout that they were kept in; without an engine.

    Later rollouts were sampled with the run's first weights: their mismatch is that of training, too.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
        DataError: A rollout is not there, or was kept by another number of processes.
        Preempted: A signal asked the run to stop, and it has saved.
    """
    _refuse_to_go_back(config)
    with joined(config, accepts_changes=accepts_changes) as job:
        _require_all(folder, config.run.num_rollouts, job)
        actor = Actor(config, job.runtime)
        course = Course(config, job.runtime, job.journal, actor, job.requests)
        course.resume({}, prompts_digest=f"rollouts of {folder.absolute()}")
        while True:
            if course.opened is None:
                course.save_if_due()
                if course.is_over:
                    break
                kept = folder / f"rollout_{course.state.rollout:06d}"
                job.journal.add_values(json.loads((kept / _METRICS).read_text()))
                course.open_rollout(read_batches(_file(kept, job)), {})
            while course.opened is not None and course.opened.steps:
                with course.watch.time("train"):
                    step = actor.train_step(
                        course.opened.steps[0],
                        is_first=course.opened.num_done == 0,
                        weight_version=course.state.weight_version,
                        lists_clipped=course.lists_clipped_tokens,
                    )
                course.count_step(step)
            course.close_rollout(course.state.weight_version + 1, {})
        course.finish()


def _file(folder: Path, job: Job) -> Path:
    return folder / f"rank_{job.runtime.rank}_of_{job.runtime.world_size}.safetensors"


def _keep(folder: Path, steps: Sequence[TrainBatch], job: Job) -> None:
    """Each rank's gradient steps, and what is known of the rollout."""
    folder.mkdir(parents=True, exist_ok=True)
    write_batches(_file(folder, job), steps)
    metrics = job.journal.rollout_metrics
    job.runtime.on_main(lambda: (folder / _METRICS).write_text(json.dumps(metrics)))


def _refuse_to_go_back(config: Config) -> None:
    if config.tracking.alarms == "roll_back":
        expected = "log, stop or off: half a loop meets the same rollouts again"
        raise ConfigError(Problem("tracking.alarms", "roll_back", expected, "--set tracking.alarms=log"))


def _require_all(folder: Path, num_rollouts: int, job: Job) -> None:
    kept = [folder / f"rollout_{rollout:06d}" for rollout in range(num_rollouts)]
    absent = [str(of_rollout) for of_rollout in kept if not _file(of_rollout, job).is_file()]
    if job.runtime.any(bool(absent)):
        raise DataError(
            f"{folder}: found no steps for rank {job.runtime.rank} of {job.runtime.world_size} in "
            f"{', '.join(absent[:3]) or 'what another rank needs'}; expected {num_rollouts} rollouts. Keep "
            "them with --rollout-only, the same config and as many processes, or lower run.num_rollouts."
        )
