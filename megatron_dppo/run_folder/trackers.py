"""Sends metrics to TensorBoard, Trackio and wandb, as `tracking.backends` selects.

The axis of rollout rows is the rollout, counted from 1 as in the log. The axis of evaluations is the number of
rollouts before them. Step rows are `step/<name>` over the gradient step, counted from 0 as in metrics.jsonl.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from megatron_dppo.errors import ConfigError, Problem

Axis = Literal["rollout", "step"]


class Backend(Protocol):
    """A metrics backend that gets the rows of metrics.jsonl."""

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Log the metrics of one rollout, evaluation or gradient step at this position of the axis."""
        ...

    def close(self) -> None:
        """Flush the remaining metrics, and close."""
        ...


class TensorBoard:
    """Writes event files in the run folder's tensorboard/."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module = _module("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, index)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a wandb run with the run folder's name; wandb's own settings choose project and mode."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._run = _module("wandb", "wandb").init(dir=str(folder), name=folder.name, config=dict(config))
        self._known = set[str]()

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Send one row with its axis; the first row of a metric defines its axis."""
        over = "gradient_step" if axis == "step" else "rollout"
        for name in [name for name in metrics if name not in self._known]:
            self._run.define_metric(name, step_metric=over)
            self._known.add(name)
        self._run.log({over: index, **metrics})

    def close(self) -> None:
        """Upload the remaining rows."""
        self._run.finish()


class Trackio:
    """Logs to a run of the project `megatron_dppo` in Trackio's local files; `trackio show` opens them."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module, quiet = _module("trackio", "trackio"), {"auto_log_gpu": False, "auto_log_cpu": False}
        self._run = module.init("megatron_dppo", folder.name, config=dict(config), embed=False, **quiet)

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Write one row."""
        self._run.log(dict(metrics), step=index)

    def close(self) -> None:
        """Write the remaining rows."""
        self._run.finish()


BACKENDS = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WeightsAndBiases}


def open_backends(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Backend]:
    """Open the trackers of these names."""
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ConfigError(
            Problem(
                "tracking.backends", ", ".join(unknown), " or ".join(BACKENDS), "Correct or remove the name."
            )
        )
    return [BACKENDS[name](folder, config) for name in names]


def _module(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            Problem(
                "tracking.backends",
                f"{package}, which does not import ({error})",
                f"the package {package}",
                "Install it with `pip install 'megatron-dppo[track]'`, or take it out of that list.",
            )
        ) from error
