"""Divides GPUs between servers and training, and estimates the gain of sampling during training.

Symbols: a and b GPU-seconds of generation and training per rollout, n of N GPUs serve, p seconds to push.

- colocated, synchronous: max(a / N, longest response) + b / N + switch
- separate, asynchronous: max(a / n, b / (N - n)) + p = T, where S T >= longest response hides it

All n are tried, if `train` accepts the rest and it fits. Rates are given (`--assume`) or assumed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Literal

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan import job as figures
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.report import wrap_line
from megatron_dppo.plan.search import conclusion_of, fits
from megatron_dppo.plan.units import Settings, as_overrides, format_count, in_seconds, require_number

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
OVER_SAMPLING = 2.0  # accepted with any S, and leaves slack for long responses from S = 2 on
_COLOCATED: Settings = {
    "rollout.engine": "sglang",
    "rollout.max_staleness": 0,
    "rollout.over_sampling": 1.0,
    "rollout.release_trainer": False,
    "rollout.sglang.colocated": True,
    "rollout.sglang.weight_sync": "tensor",
}
_AHEAD: Settings = {
    **_COLOCATED,
    "rollout.max_staleness": 1,
    "rollout.lag": 0,
    "rollout.sglang.colocated": False,
    "rollout.sglang.weight_sync": "distributed",
}


@dataclass(frozen=True)
class Rate:
    """A number that the split depends on, and its source."""

    value: float
    source: Literal["given", "assumed"]


@dataclass(frozen=True)
class Way:
    """Numbers of serving and training GPUs, and seconds of a rollout: None if there are no such numbers."""

    name: str
    serving: int = 0
    training: int = 0
    rollout_s: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Split:
    """Best divisions of N GPUs.

    Attributes:
        num_gpus: Total number of GPUs, N.
        server_gpus: Number of GPUs of one server.
        rates: Rates that the seconds depend on. Without a training rate, `step_time` is scaled by tokens.
        colocated: Servers and trainer on the same GPUs, taking turns.
        ahead: Servers and trainer on separate GPUs, running simultaneously.
        max_staleness: Smallest S that hides the longest response; None if `ahead` is not possible.
        settings: Changes of the config that make the run asynchronous with this S.
    """

    num_gpus: int
    server_gpus: int
    rates: Mapping[str, Rate]
    colocated: Way
    ahead: Way
    max_staleness: int | None
    settings: Settings


def parse_assumptions(texts: Sequence[str]) -> dict[str, float]:
    """Parse NAME=VALUE of `--assume`.

    Raises:
        ConfigError: A name is unknown, or a value is not an allowed number.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, written = text.partition("=")
        if name not in WORDS:
            expected, action = f"NAME=VALUE with one of {', '.join(WORDS)}", "Write serving_rate=2000."
            raise ConfigError(Problem("--assume", repr(text), expected, action))
        try:
            value = float(written)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (value == 0 and name not in ("push_s", "switch_s")):
            raise ConfigError(Problem(f"--assume {name}", repr(written), "a number above 0", "Correct it."))
        found[name] = value
    return found


def divide(job: Job, num_gpus: int, given: Mapping[str, float]) -> Split:
    """Divide `num_gpus` GPUs, with given rates, by the names of `WORDS`. `[parallel]` stays as configured.

    Raises:
        ConfigError: The sampling rate is unknown, or there are too few GPUs for a server and a trainer.
    """
    size = job.config.sglang.get("tp_size", 1)
    require_number("sglang.tp_size", size, "a number of GPUs", kinds=int)
    if num_gpus <= size:
        found, expected = f"{num_gpus} GPUs with servers of {size}", f"at least {size + 1}"
        raise ConfigError(Problem("--split", found, f"{expected}: a server and a trainer", "Add GPUs."))
    if "serving_rate" not in given:
        rate = "a run's rollout/num_response_tokens over time/rollout_s, for each GPU"
        expected, action = "one: plan estimates training alone", f"Add --assume serving_rate=2000: {rate}."
        raise ConfigError(Problem("--split", "no rate of sampling", expected, action))
    rates = {name: Rate(value, "assumed") for name, value in _assumed(job, num_gpus).items()}
    rates |= {name: Rate(value, "given") for name, value in given.items()}
    rates = {name: rates[name] for name in WORDS if name in rates}
    colocated, ahead = _ways(job, num_gpus, size, {name: rate.value for name, rate in rates.items()})
    if ahead.rollout_s is None:
        return Split(num_gpus, size, rates, colocated, ahead, None, {})
    bound = max(math.ceil(_longest_s(rates) / ahead.rollout_s - 1e-9), 1)
    wanted = {**_AHEAD, "rollout.max_staleness": bound, "rollout.over_sampling": OVER_SAMPLING}
    current = {key: reduce(getattr, key.split("."), job.config) for key in wanted}
    settings = {key: value for key, value in wanted.items() if current[key] != value}
    return Split(num_gpus, size, rates, colocated, ahead, bound, settings)


def _longest_s(rates: Mapping[str, Rate]) -> float:
    return rates["longest_tokens"].value * rates["token_s"].value


def _ways(job: Job, num_gpus: int, size: int, rates: Mapping[str, float]) -> tuple[Way, Way]:
    options, per_node = job.config.rollout, job.machine.gpus_per_node
    tokens = options.prompts_per_rollout * options.samples_per_prompt * rates["response_tokens"]
    work, longest_s = tokens / rates["serving_rate"], rates["longest_tokens"] * rates["token_s"]

    def training_s(num: int) -> float:
        if "training_rate" in rates:
            return tokens / rates["training_rate"] / num
        on_these = job.on(num)
        of_longest = job.config.algorithm.steps_per_rollout * step_time(on_these, on_these.layout).total
        return of_longest * rates["response_tokens"] / options.max_response_tokens

    def in_turns(serving: int, training: int) -> float:
        return max(work / serving, longest_s) + training_s(training) + rates["switch_s"]

    def at_once(serving: int, training: int) -> float:
        return max(work / serving, training_s(training)) + rates["push_s"]

    # A trainer has whole nodes or a part of one. The other GPUs have whole servers, and the rest is idle.
    training = [m for m in range(1, num_gpus - size + 1) if m <= per_node or m % per_node == 0]
    apart = [((num_gpus - m) // size * size, m) for m in training]
    same = [(num_gpus, num_gpus)] if num_gpus % size == 0 else []
    return (
        _fastest("colocated, synchronous", job.having(_COLOCATED), same, in_turns),
        _fastest("separate, asynchronous", job.having(_AHEAD), apart, at_once),
    )


def _fastest(
    name: str, job: Job, divisions: Sequence[tuple[int, int]], total: Callable[[int, int], float]
) -> Way:
    """Return the fastest division that `train` accepts and that fits, or why there is none."""
    found, refused = list[Way](), [(0, 0, "no whole servers fit")]
    for serving, training in divisions:
        own = job.on(training)
        problems = own.problems
        why_not = str(problems[0]) if problems else ""
        if not problems and not fits(own, memory := memory_of(own, own.layout)):
            why_not = conclusion_of(own, memory)
        if why_not:
            refused.append((-len(problems), training, f"{training} training GPUs: {why_not}"))
        else:
            found.append(Way(name, serving, training, total(serving, training)))
    if not found:
        return Way(name, why_not=max(refused[1:] or refused)[2])
    return min(found, key=lambda way: (way.rollout_s, way.serving))


def _assumed(job: Job, num_gpus: int) -> dict[str, float]:
    longest, parameters = job.config.rollout.max_response_tokens, job.shape.num_parameters
    network = figures.NETWORK_BYTES_PER_S * figures.LINK_EFFICIENCY
    moved = 2 * parameters * STATE_BYTES / num_gpus
    return {
        "response_tokens": longest,
        "longest_tokens": longest,
        "token_s": TOKEN_S,
        "push_s": parameters * job.workload.dtype_bytes / network,
        "switch_s": moved / job.machine.rates.host_bytes_per_s,
    }


def split_as_text(split: Split) -> str:
    """Format both ways as a table, with the smallest S and every number that they depend on."""
    return "\n".join(map(wrap_line, _lines(split))) + "\n"


def _lines(split: Split) -> Iterator[str]:
    ahead = split.ahead
    yield f"How to divide {split.num_gpus} GPUs, with servers of {format_count(split.server_gpus, 'GPU')}:"
    yield f"  {'':<26}{'serve':>7}{'train':>7}{'a rollout':>12}"
    for way in (split.colocated, ahead):
        if way.rollout_s is None:
            yield f"  {way.name:<26}not possible: {way.why_not}"
        else:
            yield f"  {way.name:<26}{way.serving:>7}{way.training:>7}{in_seconds(way.rollout_s):>12}"
    if ahead.rollout_s is not None:
        hidden = f"the smallest that hides it (S times {in_seconds(ahead.rollout_s)})"
        longest = f"The longest response takes {in_seconds(_longest_s(split.rates))}"
        yield f"{longest}: rollout.max_staleness = {split.max_staleness} is {hidden}. To set:"
        yield f"  --gpus {ahead.training} {as_overrides(split.settings)}".rstrip()
    yield "These seconds rest on:"
    for name, rate in split.rates.items():
        yield f"  {name:<16}{rate.value:>10.5g}  {rate.source:<9} {WORDS[name]}"
    if "training_rate" not in split.rates:
        yield f"  {'training_rate':<16}{'':>10}  estimated as the gradient step above, in proportion to tokens"
    yield "Assumed besides: seconds of a rollout fall with the number of GPUs; [parallel] stays as configured."


def split_as_json(split: Split) -> dict[str, Any]:
    """Return the split as plain values with stable keys."""
    values = asdict(split)
    values["set"] = values.pop("settings")
    values["ways"] = [values.pop("colocated"), values.pop("ahead")]
    return values | {"training_is_estimated": "training_rate" not in split.rates}
