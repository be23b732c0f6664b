"""Runs only one phase of the loop, for debugging: saves rollouts, or trains on saved rollouts."""

import json
from contextlib import closing
from pathlib import Path

from megatron_dppo.actor.actor import Actor
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import read_batches, write_batches
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.run.session import start_session
from megatron_dppo.runtime.files import full_disk_explained
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.train import Training

_METRICS = "metrics.json"


def rollout_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Sample all rollouts of a run with its first weights, and save their gradient steps in `folder`.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
        DiskError: The disk of the run folder or of `folder` is full.
    """
    _refuse_what_needs_both(config)
    if config.rollout.max_staleness:
        expected = "0: nothing is trained meanwhile, so that no weights are pushed to sample by"
        found, action = str(config.rollout.max_staleness), "--set rollout.max_staleness=0"
        raise ConfigError(Problem("rollout.max_staleness", found, expected, action))
    with (
        start_session(config, accepts_changes=accepts_changes) as session,
        full_disk_explained(config.run.folder, folder),
        own_servers(config, session.runtime),
    ):
        training = RolloutOnly.prepare(config, session)
        training.folder = folder
        with closing(training.rollouts), closing(training.weight_sync):
            training.run()


def train_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Train on the rollouts in `folder`, in the layout that saved them, without an engine.

    All rollouts were sampled with the run's first weights, so the mismatch of later ones includes the training.

    Raises:
        ConfigError: The configuration cannot work; raised before any model loads.
        DataError: A rollout is missing, or was saved by another number of processes.
        Preempted: A signal asked the run to stop, and it has saved.
    """
    _refuse_what_needs_both(config)
    with start_session(config, accepts_changes=accepts_changes) as session:
        _require_all(folder, config.run.num_rollouts, session.runtime)
        training = TrainOnly(config, session, Actor(config, session.runtime))
        training.folder = folder
        training.checkpoints.resume({}, prompts_digest=f"rollouts of {folder.absolute()}")
        training.run()


class RolloutOnly(Training):
    """The loop with writing instead of training: weights do not change, and no checkpoint is due."""

    folder: Path

    def evaluate(self) -> None:
        """Skip evaluation."""

    def save_if_due(self) -> None:
        """Skip saving; a request to stop is handled when the next rollout is sampled."""

    def train(self) -> None:
        """Write each rank's gradient steps, and the metrics of the rollout."""
        opened, folder = self.state.open_rollout, _of_rollout(self.folder, self.state.rollout)
        assert opened is not None, "steps are written of a rollout"
        folder.mkdir(parents=True, exist_ok=True)
        write_batches(_of_rank(folder, self.runtime), opened.steps)
        metrics = self.logger.rollout_metrics
        self.runtime.on_main(lambda: (folder / _METRICS).write_text(json.dumps(metrics)))

    def sync(self) -> None:
        """Finish the rollout without a push; the engine keeps its weights."""
        self.finish_rollout(self.state.weight_version, {})


class TrainOnly(Training):
    """The loop with reading instead of sampling, without an engine, evaluations and pushes."""

    folder: Path

    def evaluate(self) -> None:
        """Skip evaluation."""

    def roll_out(self) -> None:
        """Read the gradient steps of the next rollout, and its metrics."""
        self.state.restart_timer()
        folder = _of_rollout(self.folder, self.state.rollout)
        self.logger.add_values(json.loads((folder / _METRICS).read_text()))
        self.state.begin_rollout(read_batches(_of_rank(folder, self.runtime)))

    def sync(self) -> None:
        """Finish the rollout."""
        self.finish_rollout(self.state.weight_version + 1, {})


def _of_rollout(folder: Path, rollout: int) -> Path:
    return folder / f"rollout_{rollout:06d}"


def _of_rank(folder: Path, runtime: Runtime) -> Path:
    return folder / f"rank_{runtime.rank}_of_{runtime.world_size}.safetensors"


def _refuse_what_needs_both(config: Config) -> None:
    if config.rollout.lag:
        expected = "0: each half of the loop has only the run's first weights, so no rollout lags behind"
        raise ConfigError(Problem("rollout.lag", str(config.rollout.lag), expected, "--set rollout.lag=0"))
    if config.tracking.alarms == "roll_back":
        expected = "log, stop or off: half a loop meets the same rollouts again"
        raise ConfigError(Problem("tracking.alarms", "roll_back", expected, "--set tracking.alarms=log"))


def _require_all(folder: Path, num_rollouts: int, runtime: Runtime) -> None:
    kept = [_of_rollout(folder, rollout) for rollout in range(num_rollouts)]
    absent = [str(of_rollout) for of_rollout in kept if not _of_rank(of_rollout, runtime).is_file()]
    if runtime.any(bool(absent)):
        raise DataError(
            f"{folder}: found no steps for rank {runtime.rank} of {runtime.world_size} in "
            f"{', '.join(absent[:3]) or 'what another rank needs'}; expected {num_rollouts} rollouts. Keep "
            "them with --rollout-only, the same config and as many processes, or lower run.num_rollouts."
        )
