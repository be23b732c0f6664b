"""Divides GPUs between servers and training, and estimates the speed-up of asynchronous sampling.

Symbols: a and b GPU-seconds of generation and training per rollout, n of N GPUs serve, p seconds to push,
L_max tau seconds of the longest response.

- colocated, synchronous: max(a / N, L_max tau) + b / N + switch
- separate, synchronous: max(a / n, L_max tau) + b / (N - n) + p
- separate, asynchronous: max(a / n, b / (N - n)) + p = T, where S T >= L_max tau hides the longest response

All n are tried that servers and nodes allow, if `train` accepts the rest and it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.rates import WORDS, Rates, gather_rates, parse_assumptions
from megatron_dppo.plan.report import wrap_line
from megatron_dppo.plan.search import conclusion_of, fits
from megatron_dppo.plan.units import Settings, as_overrides, format_count, in_seconds
from megatron_dppo.run_folder.reader import read_run

SYNCHRONOUS: dict[str, Any] = {
    "rollout.engine": "sglang",
    "rollout.max_staleness": 0,
    "rollout.over_sampling": 1.0,
    "rollout.release_trainer": False,
}
COLOCATED: dict[str, Any] = SYNCHRONOUS | {
    "rollout.sglang.colocated": True,
    "rollout.sglang.weight_sync": "tensor",
}
SEPARATE: dict[str, Any] = SYNCHRONOUS | {
    "rollout.sglang.colocated": False,
    "rollout.sglang.weight_sync": "distributed",
}
OVER_SAMPLING = 2.0  # accepted with any S, and leaves slack for long responses from S = 2 on
AHEAD: dict[str, Any] = SEPARATE | {"rollout.max_staleness": 1, "rollout.lag": 0}


@dataclass(frozen=True)
class Way:
    """One way to run on the GPUs: numbers of serving and training GPUs, and seconds of a rollout.

    Attributes:
        name: Name of the way.
        serving: Number of serving GPUs.
        training: Number of training GPUs.
        rollout_s: Seconds of a rollout; None if this way is not possible.
        why_not: Reason why it is not possible.
    """

    name: str
    serving: int
    training: int
    rollout_s: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Split:
    """Best divisions of N GPUs.

    Attributes:
        num_gpus: Total number of GPUs, N.
        server_gpus: Number of GPUs of one server.
        rates: Rates that the seconds depend on.
        colocated: Servers and trainer on the same GPUs, taking turns.
        separate: Servers and trainer on separate GPUs, taking turns.
        ahead: Servers and trainer on separate GPUs, running simultaneously.
        max_staleness: Smallest S that hides the longest response; None if `ahead` is not possible.
        settings: Changes of the config that make the run asynchronous with this S.
    """

    num_gpus: int
    server_gpus: int
    rates: Rates
    colocated: Way
    separate: Way
    ahead: Way
    max_staleness: int | None
    settings: Settings

    @property
    def ways(self) -> tuple[Way, ...]:
        """The three ways to divide the GPUs between trainer and servers."""
        return self.colocated, self.separate, self.ahead

    @property
    def is_estimated(self) -> bool:
        """Whether seconds of training are the plan's estimate."""
        return "training_rate" not in self.rates.by_name


def divide(job: Job, num_gpus: int, measured: Path | None = None, assume: Sequence[str] = ()) -> Split:
    """Divide `num_gpus` GPUs, with the rates measured in a run's folder or given by `assume`.

    `[parallel]` stays as configured. `assume` has NAME=VALUE strings, see `rates.WORDS`.

    Raises:
        ConfigError: The sampling rate is unknown, or a number is invalid.
        DataError: `measured` is not a run's folder.
    """
    given = parse_assumptions(assume)
    return make_split(job, num_gpus, gather_rates(job, num_gpus, given, measured and read_run(measured)))


def make_split(job: Job, num_gpus: int, rates: Rates) -> Split:
    """Divide `num_gpus` GPUs for a job with the configured `[parallel]` sizes.

    Raises:
        ConfigError: There are too few GPUs for a server and a trainer.
    """
    size = job.config.sglang.get("tp_size", 1)
    if type(size) is not int or size < 1:
        raise ConfigError(Problem("sglang.tp_size", repr(size), "a number of GPUs", "Correct or remove it."))
    if num_gpus <= size:
        found = f"{num_gpus} GPUs with servers of {size} (sglang.tp_size)"
        raise ConfigError(
            Problem("--split", found, f"at least {size + 1}: a server and a trainer", "Add GPUs.")
        )
    samples = job.config.rollout.prompts_per_rollout * job.config.rollout.samples_per_prompt
    tokens, seconds = samples * rates["response_tokens"], partial(_training_s, job, rates)
    work, tail, push = tokens / rates["serving_rate"], rates.tail_s, rates["push_s"]

    def in_turns(serving: int, training_s: float) -> float:
        return max(work / serving, tail) + training_s + push

    def at_once(serving: int, training_s: float) -> float:
        return max(work / serving, training_s) + push

    divided = list(divisions(num_gpus, size, job.machine.gpus_per_node))
    separate = _best("separate, synchronous", job.having(SEPARATE), divided, seconds, in_turns)
    ahead = _best("separate, asynchronous", job.having(AHEAD), divided, seconds, at_once)
    bound = None if ahead.rollout_s is None else max(math.ceil(tail / ahead.rollout_s - 1e-9), 1)

    def colocated(serving: int, training_s: float) -> float:
        return max(work / serving, tail) + training_s + rates["switch_s"]

    same = [(num_gpus, num_gpus)] if num_gpus % size == 0 else []
    together = _best("colocated, synchronous", job.having(COLOCATED), same, seconds, colocated)
    wanted = AHEAD | {"rollout.max_staleness": bound, "rollout.over_sampling": OVER_SAMPLING}
    settings = {key: value for key, value in wanted.items() if _value(job.config, key) != value}
    return Split(num_gpus, size, rates, together, separate, ahead, bound, {} if bound is None else settings)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def divisions(num_gpus: int, server_gpus: int, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield (serving, training) GPUs: whole servers, and a trainer of whole nodes or of part of one.

    A server lies within one node, or takes whole nodes. GPUs on which no server fits stay idle.
    """
    for training in range(1, num_gpus):
        if training > gpus_per_node and training % gpus_per_node:
            continue
        left = num_gpus - training
        own_node = min(-training % gpus_per_node, left)  # on the trainer's last node
        nodes, rest = divmod(left - own_node, gpus_per_node)
        if server_gpus > gpus_per_node:
            servers = 0 if server_gpus % gpus_per_node else nodes // (server_gpus // gpus_per_node)
        else:
            servers = own_node // server_gpus + nodes * (gpus_per_node // server_gpus) + rest // server_gpus
        if servers:
            yield servers * server_gpus, training


def _training_s(job: Job, rates: Rates, num_gpus: int) -> float:
    """Return the seconds of training on a rollout, from the rate or the plan's estimate.

    The estimate is for responses of full length, so it is scaled by tokens.
    """
    options, mean = job.config.rollout, rates["response_tokens"]
    if "training_rate" in rates.by_name:
        samples = options.prompts_per_rollout * options.samples_per_prompt
        return samples * mean / rates["training_rate"] / num_gpus
    own, steps = job.on(num_gpus), job.config.algorithm.steps_per_rollout
    return steps * step_time(own, own.layout).total * mean / options.max_response_tokens


def _best(
    name: str,
    job: Job,
    divided: Sequence[tuple[int, int]],
    seconds: Callable[[int], float],
    total: Callable[[int, float], float],
) -> Way:
    """Return the fastest division that `train` accepts and that fits, preferring fewer servers if equal."""
    found, refused = list[Way](), list[tuple[int, int, str]]()
    for serving, training in divided:
        own = job.on(training)
        if problems := own.problems:
            refused.append((len(problems), -training, f"{training} training GPUs: {problems[0]}"))
            continue
        memory = memory_of(own, own.layout)
        if not fits(own, memory):
            refused.append((0, -training, f"{training} training GPUs: {conclusion_of(own, memory)}"))
            continue
        found.append(Way(name, serving, training, total(serving, seconds(training))))
    if not found:
        return Way(name, 0, 0, None, min(refused)[2] if refused else "no whole servers fit")
    return min(found, key=lambda way: (way.rollout_s, way.serving))


def split_as_text(split: Split) -> str:
    """Format the three ways as a table, with the smallest S and every number that they depend on."""
    lines = [*_table(split), *_conclusion(split), *_numbers(split.rates)]
    return "\n".join(map(wrap_line, lines)) + "\n"


def split_as_json(split: Split) -> dict[str, Any]:
    """Return the split as plain values with stable keys."""
    return {
        "num_gpus": split.num_gpus,
        "server_gpus": split.server_gpus,
        "ways": [asdict(way) for way in split.ways],
        "max_staleness": split.max_staleness,
        "set": dict(split.settings),
        "rates": {name: asdict(rate) for name, rate in split.rates.by_name.items()},
        "measured_in": split.rates.measured_in,
        "training_is_estimated": split.is_estimated,
    }


def _table(split: Split) -> Iterator[str]:
    yield f"How to divide {split.num_gpus} GPUs, with servers of {format_count(split.server_gpus, 'GPU')}:"
    yield f"  {'':<26}{'serve':>7}{'train':>7}{'a rollout':>12}  asynchronous is"
    best = split.ahead.rollout_s
    for way in split.ways:
        if way.rollout_s is None:
            yield f"  {way.name:<26}not possible: {way.why_not}"
            continue
        gain = "" if best is None or way is split.ahead else f"  {way.rollout_s / best:.2f} times as fast"
        yield f"  {way.name:<26}{way.serving:>7}{way.training:>7}{in_seconds(way.rollout_s):>12}{gain}"


def _conclusion(split: Split) -> Iterator[str]:
    ahead, rates = split.ahead, split.rates
    if ahead.rollout_s is None:
        return
    yield (
        f"The longest response takes {in_seconds(rates.tail_s)}: rollout.max_staleness = {split.max_staleness} "
        f"is the smallest that hides it (S times {in_seconds(ahead.rollout_s)}). To set:"
    )
    yield f"  --gpus {ahead.training} {as_overrides(split.settings)}".rstrip()
    if idle := split.num_gpus - ahead.serving - ahead.training:
        yield f"{format_count(idle, 'GPU')} stay idle: no server or layout takes them."


def _numbers(rates: Rates) -> Iterator[str]:
    yield "These seconds rest on:"
    for name, rate in rates.by_name.items():
        yield f"  {name:<16}{rate.value:>10.5g}  {rate.source:<9} {WORDS[name]}"
    if "training_rate" not in rates.by_name:
        yield f"  {'training_rate':<16}{'':>10}  estimated as the gradient step above, in proportion to tokens"
    if rates.measured_in:
        yield f"Measured in {rates.measured_in}. A server counts as busy while it has a request."
    yield "Assumed besides: seconds of a rollout fall with the number of GPUs; [parallel] stays as configured."
