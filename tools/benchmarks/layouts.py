"""Measures training speed by layout, and the effect of grouped experts, packing and long sequences.

    make bench
    python -m tools.benchmarks.layouts --processes 4
    python -m tools.benchmarks.layouts --short        one round on a tiny model; its figures mean nothing

A random Qwen3-MoE (hidden 256, 4 layers, 16 experts with top-4 routing, vocabulary 2048) in float32 trains with
the real actor: forward, backward and update. Every process has one thread, and all share this machine. With
more processes than cores, all of them slow down. Groups of processes start once. Then each round visits every
layout. Each ratio compares two figures of one round, so that a slow phase of the machine affects both.

(a) tokens/s of each layout, and the ratio to one process. A mini-batch has about four micro-batches on one
    process and two on each of two data-parallel processes. With so few, pipelines have large bubbles.
(b) grouped experts (ours) compared with Megatron's sequential experts, forward and backward.
(c) packed micro-batches compared with the same samples padded to the longest of their micro-batch, not sorted
    by length: tokens/s without padding tokens.
(d) the time of a token by sequence length, for the same number of tokens per step, compared with the cost that
    work balancing assumes (SampleCost: floating-point operations).

Figures are also written to runs/bench/layouts.json. Other busy programs distort them; the tool warns of them.
"""

import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import (
    OUT,
    ROOT,
    OtherPrograms,
    cli,
    machine,
    warn_if_busy,
    write_json,
)
from tools.benchmarks.ranks import Ranks

ONE = "one process"
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {ONE: {}},
    2: {
        "DP2": {},
        "EP2": {"expert": 2},
        "TP2": {"tensor": 2},
        "PP2": {"pipeline": 2},
        "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "CP2": {"context": 2},
        "TP2 EP2 ETP1": {"tensor": 2, "expert": 2, "expert_tensor": 1},
    },
    4: {
        "DP4": {},
        "EP4": {"expert": 4},
        "DP2 EP2": {"expert": 2},
        "DP2 TP2": {"tensor": 2},
        "TP2 EP4": {"tensor": 2, "expert": 4, "expert_tensor": 1},
        "PP2 EP2": {"pipeline": 2, "expert": 2},
        "CP2 EP2 DP2": {"context": 2, "expert": 2},
    },
}
RATIO = ("ratio", "min", "max")


@dataclass(frozen=True)
class Plan:
    """Sizes of the model and of the measurements."""

    sizes: Mapping[str, int]  # sizes of the model, with the keys of config.json
    longest: int  # maximum tokens of a sample in (a) and (c)
    num_tokens: int  # approximate tokens of a mini-batch in (a) and (c)
    max_tokens: int  # maximum tokens of a micro-batch in (a) and (c)
    tokens_per_expert: Sequence[int]
    lengths: Sequence[int]  # sequence lengths in (d)
    budget: int  # tokens of a step in (d)


FULL = Plan(
    sizes={
        "vocab_size": 2048,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 4096,
    },
    longest=512,
    num_tokens=4096,
    max_tokens=1024,
    tokens_per_expert=(1, 4, 16, 64, 256),
    lengths=(64, 128, 256, 512, 1024, 2048, 4096),
    budget=4096,
)
SHORT = Plan(
    sizes={"num_hidden_layers": 4, "max_position_embeddings": 128},
    longest=32,
    num_tokens=128,
    max_tokens=64,
    tokens_per_expert=(1, 4),
    lengths=(16, 32, 64),
    budget=64,
)


def main(
    processes: Annotated[int, typer.Option(min=1, max=4, help="Largest number of processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds: measurements of each layout and comparison.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps per round, after one warm-up step.")] = 2,
    short: Annotated[
        bool, typer.Option(help="One round on a tiny model, to test that everything runs.")
    ] = False,
    out: Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")] = OUT
    / "layouts.json",
) -> None:
    """Print four tables."""
    os.chdir(ROOT)
    plan, rounds, steps = (SHORT, 1, 1) if short else (FULL, rounds, steps)
    others, figures = OtherPrograms(), dict[str, Any]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        groups = {size: stack.enter_context(Ranks(size, OUT / "layouts")) for size in _sizes(processes)}
        one, model = groups[1], f"{folder}/model"
        one.call("write_model", folder=model, sizes=dict(plan.sizes))
        figures["layouts"] = measure_layouts(groups, model, plan, rounds, steps)
        figures["experts"] = one.call(
            "expert_seconds",
            model=model,
            num_experts=plan.sizes.get("num_experts", 8),
            tokens_per_expert=list(plan.tokens_per_expert),
            num_rounds=rounds,
        )
        figures["packing"] = {
            name: one.call(
                "packed_and_padded_seconds",
                model=model,
                lengths=lengths,
                max_tokens=plan.max_tokens,
                num_rounds=rounds,
            )
            for name, lengths in _mixtures(plan).items()
        }
        lengths, budget = list(plan.lengths), plan.budget
        figures["lengths"] = one.call(
            "length_seconds", model=model, lengths=lengths, num_tokens=budget, num_rounds=rounds
        )
    other_cores = others.cores()
    show(figures, plan, rounds, steps)
    warn_if_busy("layouts", other_cores)
    counts = {"rounds": rounds, "steps": steps, "other_cores": other_cores}
    write_json(out, {"machine": machine(), **counts, "sizes": dict(plan.sizes), **figures})


def _sizes(processes: int) -> list[int]:
    """Return the group sizes to measure: sizes with layouts, but on GPUs no more than there are devices."""
    num_devices = torch.accelerator.device_count()  # 0 on a CPU: processes then share the cores
    sizes = [size for size in LAYOUTS if size <= processes]
    for size in sizes:
        if 0 < num_devices < size:
            typer.echo(
                f"layouts on {size} processes: left out, they need {size} devices and found {num_devices}"
            )
    return [size for size in sizes if not 0 < num_devices < size]


def mixed_lengths(longest: int, num_tokens: int) -> list[int]:
    """Return log-uniform lengths from longest / 16 to longest, then the longest. The seed is fixed."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < num_tokens:
        lengths.append(max(10, round(longest * 2.0 ** draw.uniform(-4, 0))))
    return [*lengths, longest]


def _mixtures(plan: Plan) -> dict[str, list[int]]:
    """Return the sample lengths of (c)."""
    short = max(10, plan.longest // 8)
    num_periods = -(-plan.num_tokens // (plan.longest + 7 * short))
    return {
        f"{short // 2} to {plan.longest}, mixed": mixed_lengths(plan.longest, plan.num_tokens),
        f"{short}, one in eight {plan.longest}": [plan.longest, *[short] * 7] * num_periods,
        f"all {plan.longest}": [plan.longest] * -(-plan.num_tokens // plan.longest),
    }


def measure_layouts(
    groups: Mapping[int, Ranks], model: str, plan: Plan, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Measure tokens/s of each layout in each round. Every second round visits the layouts in reverse order."""
    lengths = mixed_lengths(plan.longest, plan.num_tokens)
    named = [(name, size, parallel) for size in groups for name, parallel in LAYOUTS[size].items()]
    found: dict[str, dict[str, Any]] = {
        name: {"processes": size, "tokens_per_s": []} for name, size, _ in named
    }
    with tqdm(total=rounds * len(named), desc="layouts", unit="visit") as bar:
        for index in range(rounds):
            for name, size, parallel in named[:: 1 if index % 2 == 0 else -1]:
                split = {**parallel, "max_tokens_per_microbatch": plan.max_tokens}
                seconds = groups[size].call(
                    "layout_seconds", model=model, parallel=split, lengths=lengths, num_steps=steps
                )
                found[name]["tokens_per_s"].append(sum(lengths) / statistics.median(seconds))
                bar.update()
    return found


def ratio_cells(values: Sequence[float], references: Sequence[float]) -> list[str]:
    """Return the median, minimum and maximum of value / reference over the rounds."""
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    return [f"{of(ratios):.2f}" for of in (statistics.median, min, max)]


def show(figures: Mapping[str, Any], plan: Plan, rounds: int, steps: int) -> None:
    """Print the four tables."""
    median = statistics.median
    typer.echo(f"\nRounds: {rounds}. Threads of each process: 1. Cores of this machine: {os.cpu_count()}.")
    layouts = figures["layouts"]
    rows = [
        [
            *(name, str(row["processes"]), f"{median(row['tokens_per_s']):,.0f}"),
            *ratio_cells(row["tokens_per_s"], layouts[ONE]["tokens_per_s"]),
        ]
        for name, row in layouts.items()
    ]
    num_tokens = sum(mixed_lengths(plan.longest, plan.num_tokens))
    title = f"(a) training by layout, ratio to one process; steps of {num_tokens} tokens, {steps} in a round"
    show_table(title, ("layout", "processes", "tokens/s", *RATIO), rows)
    rows = [
        [
            *(tokens, *(f"{median(row[kind]) * 1e3:.3f}" for kind in ("grouped", "sequential"))),
            *ratio_cells(row["sequential"], row["grouped"]),
        ]
        for tokens, row in figures["experts"].items()
    ]
    title = "(b) experts, ms of forward and backward on one process, ratio sequential / grouped"
    show_table(title, ("tokens per expert", "grouped", "sequential", *RATIO), rows)
    rows = []
    for name, row in figures["packing"].items():
        padding = 1 - row["num_tokens"] / row["num_padded_tokens"]
        speeds = [f"{row['num_tokens'] / median(row[kind]):,.0f}" for kind in ("packed", "padded")]
        rows.append([name, f"{padding:.0%}", *speeds, *ratio_cells(row["padded"], row["packed"])])
    title = "(c) tokens/s without padding on one process, ratio packed / padded"
    show_table(title, ("sample lengths", "padding", "packed", "padded", *RATIO), rows)
    seconds, predicted = figures["lengths"]["seconds"], figures["lengths"]["predicted"]
    shortest = str(min(plan.lengths))
    rows = [
        [
            *(length, f"{median(values) * 1e6 / plan.budget:.1f}"),
            *ratio_cells(values, seconds[shortest]),
            f"{predicted[length] / predicted[shortest]:.2f}",
        ]
        for length, values in seconds.items()
    ]
    title = f"(d) {plan.budget} tokens in sequences of one length, one process, ratio to the shortest"
    show_table(title, ("length", "ms per 1k tokens", *RATIO, "predicted"), rows)
    typer.echo()


if __name__ == "__main__":
    cli(main, __doc__)
