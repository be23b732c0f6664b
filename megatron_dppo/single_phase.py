"""Runs only one phase of the loop, for debugging: saves rollouts, or trains on saved rollouts."""

import json
from contextlib import closing
from pathlib import Path

from megatron_dppo.actor.actor import Actor
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import read_batches, write_batches
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.run.parts import RunParts
from megatron_dppo.run.session import start_session
from megatron_dppo.runtime.files import full_disk_explained
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.train import Training, take_steps

_METRICS = "metrics.json"


def rollout_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Sample all rollouts of a run with its first weights, and save their gradient steps in `folder`."""
    _refuse_what_needs_both(config)
    if num_versions := config.rollout.staleness.max_versions:
        expected = "0: nothing is trained meanwhile, so that no weights are pushed to sample by"
        action = "--set rollout.max_staleness=0"
        raise ConfigError(Problem("rollout.max_staleness", str(num_versions), expected, action))
    with (
        start_session(config, accepts_changes=accepts_changes) as session,
        full_disk_explained(config.run.folder, folder),
        own_servers(config, session.runtime),
    ):
        training = RolloutOnly.prepare(config, session)
        with closing(training):
            training.run_into(folder)


def train_only(config: Config, folder: Path, *, accepts_changes: bool = False) -> None:
    """Train on the rollouts in `folder`, in the layout that saved them, without an engine.

    All rollouts were sampled with the run's first weights, so the mismatch of later ones includes the training.
    """
    _refuse_what_needs_both(config)
    with start_session(config, accepts_changes=accepts_changes) as session:
        _require_all(folder, config.run.num_rollouts, session.runtime)
        parts = RunParts(config, session, Actor(config, session.runtime), sync=None)
        parts.checkpoints.resume({}, prompts_digest=f"rollouts of {folder.absolute()}")
        _train_on(parts, folder)


class RolloutOnly(Training):
    """The loop with writing instead of training: weights do not change, and no checkpoint is due."""

    def run_into(self, folder: Path) -> None:
        """Sample every rollout, and write its gradient steps in a folder."""
        while not self.state.is_over:
            if self.state.open_rollout is None:
                self.roll_out()
            self._write(_rollout_folder(folder, self.state.rollout))
            self.parts.finish_rollout(self.state.weight_version, {})  # the engine keeps its weights
        self.parts.checkpoints.wait()

    def _write(self, folder: Path) -> None:
        """Write this rank's gradient steps, and the metrics of the rollout."""
        opened, runtime = self.state.open_rollout, self.parts.runtime
        assert opened is not None, "steps are written of a rollout"
        folder.mkdir(parents=True, exist_ok=True)
        write_batches(_rank_file(folder, runtime), self.state.steps[: opened.num_steps])
        metrics = self.parts.logger.rollout_metrics
        runtime.on_main(lambda: (folder / _METRICS).write_text(json.dumps(metrics)))


def _train_on(parts: RunParts, folder: Path) -> None:
    """Run the loop with reading instead of sampling, without an engine, evaluations and pushes."""
    state = parts.state
    while True:
        if state.open_rollout is None:
            parts.save_if_due()
            if state.is_over:
                break
            _read(parts, _rollout_folder(folder, state.rollout))
        take_steps(parts)
        parts.finish_rollout(state.weight_version + 1, {})
    parts.checkpoints.wait()


def _read(parts: RunParts, folder: Path) -> None:
    """Open the next rollout with its saved gradient steps and metrics."""
    parts.state.restart_timer()
    parts.logger.add_values(json.loads((folder / _METRICS).read_text()))
    parts.state.begin_rollout(read_batches(_rank_file(folder, parts.runtime)))


def _rollout_folder(folder: Path, rollout: int) -> Path:
    return folder / f"rollout_{rollout:06d}"


def _rank_file(folder: Path, runtime: Runtime) -> Path:
    return folder / f"rank_{runtime.rank}_of_{runtime.world_size}.safetensors"


def _refuse_what_needs_both(config: Config) -> None:
    if num_waiting := config.rollout.staleness.num_waiting:
        expected = "0: each half of the loop has only the run's first weights, so no rollout lags behind"
        raise ConfigError(Problem("rollout.lag", str(num_waiting), expected, "--set rollout.lag=0"))
    if config.tracking.alarms == "roll_back":
        expected = "log, stop or off: half a loop meets the same rollouts again"
        raise ConfigError(Problem("tracking.alarms", "roll_back", expected, "--set tracking.alarms=log"))


def _require_all(folder: Path, num_rollouts: int, runtime: Runtime) -> None:
    kept = [_rollout_folder(folder, rollout) for rollout in range(num_rollouts)]
    absent = [str(each) for each in kept if not _rank_file(each, runtime).is_file()]
    if runtime.any(bool(absent)):
        raise DataError(
            f"{folder}: found no steps for rank {runtime.rank} of {runtime.world_size} in "
            f"{', '.join(absent[:3]) or 'what another rank needs'}; expected {num_rollouts} rollouts. Keep "
            "them with --rollout-only, the same config and as many processes, or lower run.num_rollouts."
        )
