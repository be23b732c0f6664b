"""Collects the rates of serving and training with their sources: given, measured in a run, or assumed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan import job as figures
from megatron_dppo.plan.job import Job
from megatron_dppo.run_folder.reader import Run

Source = Literal["given", "measured", "assumed"]

WORDS: Mapping[str, str] = {
    "serving_rate": "tokens/s that a serving GPU samples",
    "training_rate": "tokens/s that a training GPU trains on",
    "response_tokens": "tokens of a response, mean",
    "longest_tokens": "tokens of the longest response",
    "token_s": "s for each token of one response",
    "push_s": "s of hold, push and prefill again",
    "switch_s": "s of a colocated trainer's leaving and coming back",
}
"""Names that `--assume` accepts, and their meanings."""

TOKEN_S = 0.02
"""Seconds per token of one response of a loaded server; an assumption."""
STATE_BYTES = 16
"""Bytes per parameter of weights and optimizer states that a colocated trainer moves to the host and back."""
LAST = 20  # rollouts that are measured; the first (warm-up) rollout of a run only if there is no other

_SERVING_GPUS = "serving_gpus"
_NEEDED = ("time/total_s", "time/rollout_s", "time/sync_s", "rollout/num_response_tokens")
_NOT_NEGATIVE = ("push_s", "switch_s")


@dataclass(frozen=True)
class Rate:
    """A number that the split depends on, and its source."""

    value: float
    source: Source


@dataclass(frozen=True)
class Rates:
    """All numbers of `WORDS`; without a training rate, the plan's estimate of a gradient step is used.

    Attributes:
        by_name: Numbers by name.
        measured_in: Description of the measured run; empty without a measurement.
    """

    by_name: Mapping[str, Rate]
    measured_in: str

    def __getitem__(self, name: str) -> float:
        """Return a number's value."""
        return self.by_name[name].value

    @property
    def tail_s(self) -> float:
        """L_max tau: seconds of the longest response."""
        return self["longest_tokens"] * self["token_s"]


def parse_assumptions(texts: Sequence[str]) -> dict[str, float]:
    """Parse NAME=VALUE of `--assume`.

    Raises:
        ConfigError: A name is unknown, or a value is not an allowed number.
    """
    found, names = dict[str, float](), (*WORDS, _SERVING_GPUS)
    for text in texts:
        name, equals, written = text.partition("=")
        if not equals or name not in names:
            expected = f"NAME=VALUE with one of {', '.join(names)}"
            raise ConfigError(
                Problem("--assume", repr(text), expected, "Write for example --assume serving_rate=2000.")
            )
        try:
            value = float(written)
        except ValueError:
            value = math.nan
        least = "0 or more" if name in _NOT_NEGATIVE else "above 0"
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name in _NOT_NEGATIVE))):
            raise ConfigError(Problem(f"--assume {name}", repr(written), f"a number {least}", "Correct it."))
        found[name] = value
    return found


def gather_rates(job: Job, num_gpus: int, given: Mapping[str, float], run: Run | None) -> Rates:
    """Return the rates of a job: given rates first, then a run's measured rates, then assumptions.

    Args:
        job: Planned job.
        num_gpus: Total number of GPUs, for servers and training.
        given: Result of `parse_assumptions`.
        run: Run to measure, if any.

    Raises:
        ConfigError: The run cannot be measured, or the sampling rate is unknown.
    """
    measured, where = ({}, "") if run is None else _measure_rates(run, given.get(_SERVING_GPUS))
    by_name = {name: Rate(value, "assumed") for name, value in _assume_rates(job, num_gpus).items()}
    by_name |= {name: Rate(value, "measured") for name, value in measured.items()}
    by_name |= {name: Rate(value, "given") for name, value in given.items() if name != _SERVING_GPUS}
    if "serving_rate" not in by_name:
        raise ConfigError(
            Problem(
                "--split",
                "no rate of sampling",
                "one: plan estimates training alone",
                "Add --measured RUN, the folder of a run, or --assume serving_rate=2000 (tokens/s of a GPU).",
            )
        )
    return Rates({name: by_name[name] for name in WORDS if name in by_name}, where)


def _assume_rates(job: Job, num_gpus: int) -> dict[str, float]:
    longest, parameters = job.config.rollout.max_response_tokens, job.shape.num_parameters
    weights_s = parameters * job.workload.dtype_bytes / (figures.NETWORK_BYTES_PER_S * figures.LINK_EFFICIENCY)
    moved = 2 * parameters * STATE_BYTES / num_gpus
    return {
        "response_tokens": longest,
        "longest_tokens": longest,
        "token_s": TOKEN_S,
        "push_s": weights_s,
        "switch_s": moved / job.machine.rates.host_bytes_per_s,
    }


def _measure_rates(run: Run, serving_gpus: float | None) -> tuple[dict[str, float], str]:
    """Return the rates measured in a run's last rollouts, and a description of the GPUs."""
    usable = [row for row in run.rollouts if all(math.isfinite(row.values.get(n, math.nan)) for n in _NEEDED)]
    usable = usable[1:][-LAST:] or usable
    if not usable:
        expected = f"finished rollouts with {', '.join(_NEEDED)}"
        raise ConfigError(
            Problem("--measured", str(run.path), expected, "Name a run that sampled and trained.")
        )
    rows = [row.values for row in usable]
    total, wait, push, tokens = (fmean(row[name] for row in rows) for name in _NEEDED)
    serving, training = _num_serving(run, rows, serving_gpus), _num_training(run)
    training_s, busy = max(total - wait - push, 0.0), 0.0
    found = {"push_s": push}
    if run.option("rollout.max_staleness"):
        names = ("engine/busy_in_training", "engine/requests_in_training")
        busy, requests = (fmean(row.get(name, math.nan) for row in rows) for name in names)
        if not math.isfinite(busy + requests):
            expected = f"rows with {' and '.join(names)}"
            raise ConfigError(Problem("--measured", str(run.path), expected, "Name another run."))
        if requests:
            found["token_s"] = requests * total / tokens  # Little's law
    generation_s = wait + busy * training_s
    if min(tokens, generation_s, training_s) <= 0:
        found_s = f"{tokens:g} tokens, {generation_s:g} s of sampling, {training_s:g} s of training"
        raise ConfigError(Problem("--measured", found_s, "all above 0", "Name a run that sampled and trained."))
    found |= {
        "serving_rate": tokens / generation_s / serving,
        "training_rate": tokens / training_s / training,
    }
    lengths = [row.get("rollout/response_length_mean", math.nan) for row in rows]
    if all(map(math.isfinite, lengths)):
        found["response_tokens"] = fmean(lengths)
    longest = max((row.values.get("theory/longest_response", 0.0) for row in run.steps), default=0.0)
    if longest:
        found["longest_tokens"] = longest
    engine = "" if run.option("rollout.engine") == "sglang" else ", with the embedded engine"
    where = (
        f"{run.path}, rollouts {usable[0].rollout} to {usable[-1].rollout}: {serving:g} serving and "
        f"{training} training GPUs{engine}"
    )
    return found, where


def _num_serving(run: Run, rows: Sequence[Mapping[str, float]], given: float | None) -> float:
    """Return the number of GPUs that sampled: the trainer's if they were shared, otherwise its servers'."""
    if given is not None:
        return given
    if run.option("rollout.engine") != "sglang" or run.option("rollout.sglang.colocated"):
        return _num_training(run)
    servers = rows[-1].get("sync/servers", math.nan)
    if not math.isfinite(servers) or servers < 1:
        action = f"Add --assume {_SERVING_GPUS}=8, the GPUs of all servers."
        raise ConfigError(Problem("--measured", "no sync/servers in its rows", "the number of servers", action))
    return servers * (run.option("sglang.tp_size") or 1)


def _num_training(run: Run) -> int:
    found = run.versions.get("world_size")
    if not isinstance(found, int) or found < 1:
        action = "Name a run with a complete folder."
        raise ConfigError(Problem("--measured", "no world_size in its versions.json", "one", action))
    return found
