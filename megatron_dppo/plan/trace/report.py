"""Formats a trace as text and as JSON. Bytes in JSON, GiB (2^30 bytes) in the text."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_dppo.plan.trace.depths import BETWEEN, MOMENTS, Trace
from megatron_dppo.plan.trace.tensors import BACKWARD, FORWARD
from megatron_dppo.plan.units import in_gib

_NUM_LINES = 12
"""Number of source lines in the report."""


def as_text(trace: Trace) -> str:
    """Format the complete trace as text."""
    blocks = [_heading(trace), _table(trace), _lines(trace), _operators(trace)]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _heading(trace: Trace) -> Iterator[str]:
    where = f"rank {trace.settings.rank} of {trace.settings.layout.world_size}"
    if trace.settings.layout.pipeline > 1:
        where += f", of pipeline stage {trace.stage}"
    batches = f"{trace.settings.num_microbatches} x {trace.settings.num_tokens} tokens"
    yield f"Traced: the gradient step of {where} on {batches}, in {trace.seconds:.0f} s."
    if trace.is_extrapolated:
        depths = f"{trace.shallow.num_layers} and {trace.deep.num_layers}"
        yield f"Run with {depths} layers, and extrapolated to {trace.num_layers} by what a layer adds."
    moment, peak = trace.peak
    verb = "fits" if peak <= trace.gpu_bytes else "does not fit"
    yield (
        f"With what a trace does not see it {verb}: {in_gib(peak)} of {in_gib(trace.gpu_bytes)} GiB "
        f"{'between steps' if moment == BETWEEN else f'in the phase {moment}'}."
    )


def _table(trace: Trace) -> Iterator[str]:
    yield "GiB live at most:" + "".join(f"{moment:>15}" for moment in MOMENTS)
    traced = trace.traced
    yield _row("traced", [_gib(traced.get(moment)) for moment in MOMENTS])
    yield _row("planned", [_gib(trace.planned[moment]) for moment in MOMENTS])
    yield _row("traced is", [_off(traced.get(moment), trace.planned[moment]) for moment in MOMENTS])
    yield _row("not traced", [_gib(trace.not_traced[moment]) for moment in MOMENTS])
    yield "Planned: for experts that get as many tokens each, as in a trace, and without fragmentation."
    yield "Not traced, as planned: the step's other micro-batches, CUDA and NCCL, and a colocated engine."


def _row(name: str, values: list[str]) -> str:
    return f"  {name:<15}" + "".join(f"{value:>15}" for value in values)


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else in_gib(num_bytes, 2)


def _off(traced: int | None, planned: int) -> str:
    return "-" if traced is None else f"{traced / planned - 1:+.1%}"


def _lines(trace: Trace) -> Iterator[str]:
    moment = max(trace.deep.peaks, key=lambda phase: trace.deep.peaks[phase].num_bytes)
    yield f"Who holds most at the peak ({moment}, {trace.deep.num_layers} layers), GiB by source line:"
    for line, num_bytes in trace.deep.peaks[moment].by_line.most_common(_NUM_LINES):
        if num_bytes >= 0.005 * 2**30:
            yield f"  {in_gib(num_bytes, 2):>8}  {line}"


def _operators(trace: Trace) -> Iterator[str]:
    added, whole, num = (
        trace.per_layer,
        trace.deep.count,
        trace.layers_between * trace.settings.num_microbatches,
    )
    forward, backward = (added.launches[phase] / num for phase in (FORWARD, BACKWARD))
    collectives, waits = added.collectives.total() / num, added.waits.total() / num
    yield (
        f"A layer: {forward:.0f} launches forward and {backward:.0f} backward, "
        f"{collectives:.0f} collectives, {waits:.1f} waits of the host."
    )
    yield from _most(Counter({key: n for key, n in added.waits.items() if n > 0}), num)
    total = f"{whole.launches.total()} launches, {whole.waits.total()} waits of the host:"
    yield f"The whole step of {trace.deep.num_layers} layers: {total}"
    yield from _most(whole.waits, 1)


def _most(waits: Counter[tuple[str, str]], num: int) -> Iterator[str]:
    for (phase, place), count in waits.most_common(_NUM_LINES):
        yield f"  {count / num:>8.3g}  {phase:<9} {place}"


def as_json(trace: Trace) -> dict[str, Any]:
    """Return the trace as plain values with stable keys."""
    moment, peak = trace.peak
    num = trace.layers_between * trace.settings.num_microbatches
    return {
        "layout": asdict(trace.settings.layout),
        "rank": trace.settings.rank,
        "stage": trace.stage,
        "num_layers": trace.num_layers,
        "traced_layers": [trace.shallow.num_layers, trace.deep.num_layers],
        "is_extrapolated": trace.is_extrapolated,
        "microbatch_tokens": trace.settings.num_tokens,
        "num_microbatches": trace.settings.num_microbatches,
        "traced_bytes": trace.traced,
        "planned_bytes": dict(trace.planned),
        "not_traced_bytes": dict(trace.not_traced),
        "peak": {"moment": moment, "bytes": peak, "fits": peak <= trace.gpu_bytes},
        "bytes_by_line": {
            phase: dict(peak.by_line.most_common(_NUM_LINES)) for phase, peak in trace.deep.peaks.items()
        },
        "per_layer": {
            "launches": {phase: n / num for phase, n in trace.per_layer.launches.items()},
            "waits": {" ".join(key): n / num for key, n in trace.per_layer.waits.items() if n},
        },
        "step": {
            "launches": dict(trace.deep.count.launches),
            "collectives": dict(trace.deep.count.collectives),
            "waits": {" ".join(key): n for key, n in trace.deep.count.waits.items()},
        },
        "seconds": trace.seconds,
    }
