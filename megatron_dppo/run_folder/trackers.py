"""Sends metrics to TensorBoard, Trackio, wandb and Prometheus, as `tracking.backends` selects; alarms to a URL.

The axis of rollout rows is the rollout, counted from 1 as in the log. The axis of evaluations is the number of
rollouts before them. Step rows are `step/<name>` over the gradient step, counted from 0 as in metrics.jsonl.
"""

import importlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.error import URLError
from urllib.parse import urlsplit

from megatron_dppo.errors import ConfigError, Problem, writing_to
from megatron_dppo.runtime.files import write_jsonl

Axis = Literal["rollout", "step"]
WEBHOOK = "MEGATRON_DPPO_ALARM_WEBHOOK"
"""Environment variable with the URL that gets alarms. Such a URL is a secret: who knows it can post."""
log = logging.getLogger(__name__)
_WEBHOOK_TIMEOUT_S = 10.0


class Backend:
    """A metrics backend that gets the rows of metrics.jsonl, and alarms; a subclass takes one or both."""

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Log the metrics of one rollout, evaluation or gradient step at this position of the axis."""

    def alarm(self, rollout: int, found: Mapping[str, str]) -> None:
        """Report the alarms of a rollout, an index from 0: messages by name."""

    def close(self) -> None:
        """Flush the remaining metrics, and close."""


class TensorBoard(Backend):
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


class WeightsAndBiases(Backend):
    """Logs to one wandb run with the run folder's name; wandb's own settings choose project and mode."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module, run_id = _module("wandb", "wandb"), _run_id(folder)
        same = {"id": run_id, "resume": "allow", "allow_val_change": True}
        self._run = module.init(dir=str(folder), name=folder.name, config=dict(config), **same)
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


class Trackio(Backend):
    """Logs to one run of the project `megatron_dppo` in Trackio's local files; `trackio show` opens them."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        module, quiet = _module("trackio", "trackio"), {"auto_log_gpu": False, "auto_log_cpu": False}
        name = f"{folder.name}-{_run_id(folder)}"  # Trackio resumes by name, and several folders may share one
        options = {"config": dict(config), "resume": "allow", "embed": False}
        self._run = module.init("megatron_dppo", name, **options, **quiet)

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Write one row."""
        self._run.log(dict(metrics), step=index)

    def close(self) -> None:
        """Write the remaining rows."""
        self._run.finish()


class Prometheus(Backend):
    """Serves the latest values at http://`tracking.prometheus_address`/metrics."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        client = _module("prometheus_client", "prometheus_client")
        address, registry = config["tracking"]["prometheus_address"], client.CollectorRegistry()
        client.Info("megatron_dppo_run", "The run.", registry=registry).info({"folder": str(folder)})
        gauge, prefix = client.Gauge, "megatron_dppo"
        self._value = gauge(f"{prefix}_metric", "Latest value in metrics.jsonl.", ["name"], registry=registry)
        self._count = gauge(f"{prefix}_finished", "Rollouts and gradient steps.", ["axis"], registry=registry)
        self._at = gauge(f"{prefix}_last_row_timestamp_seconds", "Time of the last row.", registry=registry)
        self._alarms = client.Counter(f"{prefix}_alarms", "Raised alarms.", ["name"], registry=registry)
        try:
            place = urlsplit(f"//{address}")
            self._server, _ = client.start_http_server(place.port, place.hostname, registry)
        except (OSError, ValueError) as error:  # taken, of another host, or a port above 65535
            found, expected = f"{address} ({error})", "a free address of rank 0's host"
            problem = Problem("tracking.prometheus_address", found, expected, "Choose another port.")
            raise ConfigError(problem) from error

    def log(self, metrics: Mapping[str, float], axis: Axis, index: int) -> None:
        """Replace the values of these metrics."""
        for name, value in metrics.items():
            self._value.labels(name).set(value)
        self._count.labels(axis).set(index + (axis == "step"))
        self._at.set(time.time())

    def alarm(self, rollout: int, found: Mapping[str, str]) -> None:
        """Count each alarm."""
        for name in found:
            self._alarms.labels(name).inc()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


NO_URL = Problem(WEBHOOK, "a text that is none", "an http or https URL", "Correct or unset it.")
"""A problem that does not show the text, which may be a secret."""


def is_url(text: str) -> bool:
    """Return whether a text is an http or https URL with a host, and a port if it names one."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not re.search(r"\s", text)
        )
    except ValueError:
        return False


class Webhook(Backend):
    """Posts alarms to a URL, as JSON with a "text" and the same as "content". A failure is only a warning."""

    def __init__(self, url: str, folder: Path) -> None:
        if not is_url(url):
            raise ConfigError(NO_URL)
        self._url, self._folder, self._posts = url, folder, list[threading.Thread]()

    def alarm(self, rollout: int, found: Mapping[str, str]) -> None:
        """Post the alarms of a rollout in a thread, so that nothing waits."""
        texts = "; ".join(f"{name}: {text}" for name, text in found.items())
        text = f"{self._folder.name} on {socket.gethostname()}, rollout {rollout + 1}: {texts}"
        body = {
            "text": text,
            "content": text,
            "run": str(self._folder),
            "rollout": rollout,
            "alarms": dict(found),
        }
        self._posts.append(threading.Thread(target=self._post, args=(body,), daemon=True, name="webhook"))
        self._posts[-1].start()

    def close(self) -> None:
        """Wait a moment for alarms that are on their way, such as the one that stops the run."""
        for post in self._posts:
            post.join(_WEBHOOK_TIMEOUT_S)

    def _post(self, body: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT_S).close()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run continues
            reason = error.reason if isinstance(error, URLError) else type(error).__name__  # without the URL
            log.warning("an alarm did not reach the URL of %s: %s", WEBHOOK, reason)


BACKENDS = {
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


def open_backends(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Backend]:
    """Open the trackers of these names, and the webhook if its variable is set."""
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ConfigError(
            Problem(
                "tracking.backends", ", ".join(unknown), " or ".join(BACKENDS), "Correct or remove the name."
            )
        )
    url = os.environ.get(WEBHOOK)
    return [*([Webhook(url, folder)] if url else []), *(BACKENDS[name](folder, config) for name in names)]


def _run_id(folder: Path) -> str:
    """Return the id of the run in trackers, kept in the run folder: a resumed run continues the same one."""
    file = folder / "tracker_run.json"
    if not file.exists():
        with writing_to("run.folder", folder):
            write_jsonl(file, [{"id": secrets.token_hex(4)}])
    return str(json.loads(file.read_text())["id"])


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
