"""Formats the best division of GPUs between servers and training, as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_dppo.plan.rates import WORDS, Rates
from megatron_dppo.plan.report import wrapped
from megatron_dppo.plan.settings import as_overrides
from megatron_dppo.plan.split import Split, Way
from megatron_dppo.plan.units import counted, in_seconds


def as_text(split: Split) -> str:
    """Format the three ways as a table, with the smallest S and every number that they depend on."""
    lines = [*_table(split), *_conclusion(split), *_numbers(split.rates)]
    return "\n".join(map(wrapped, lines)) + "\n"


def as_json(split: Split) -> dict[str, Any]:
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
    yield f"How to divide {split.num_gpus} GPUs, with servers of {counted(split.server_gpus, 'GPU')}:"
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
    if idle := _idle(split, ahead):
        yield f"{counted(idle, 'GPU')} stay idle: no server or layout takes them."


def _idle(split: Split, way: Way) -> int:
    return split.num_gpus - way.serving - way.training


def _numbers(rates: Rates) -> Iterator[str]:
    yield "These seconds rest on:"
    for name, rate in rates.by_name.items():
        yield f"  {name:<16}{rate.value:>10.5g}  {rate.source:<9} {WORDS[name]}"
    if "training_rate" not in rates.by_name:
        yield f"  {'training_rate':<16}{'':>10}  estimated as the gradient step above, in proportion to tokens"
    if rates.measured_in:
        yield f"Measured in {rates.measured_in}. A server counts as busy while it has a request."
    yield "Assumed besides: seconds of a rollout fall with the number of GPUs; [parallel] stays as configured."
