"""Measures training speed by layout: tokens/s of each layout, and the ratio to one process.

    make bench
    python -m tools.benchmarks.layouts --processes 4
    python -m tools.benchmarks.layouts --short        one round on a tiny model; its figures mean nothing

A random Qwen3-MoE (hidden 256, 4 layers, 16 experts with top-4 routing, vocabulary 2048) in float32 trains with
the real actor: forward, backward and update. Every process has one thread, and all share this machine. With
more processes than cores, all of them slow down. Each round starts the processes of each size once and visits
every layout, every second round in reverse order. Each ratio compares two figures of one round, so that a slow
phase of the machine affects both. A mini-batch has about four micro-batches on one process and two on each of
two data-parallel processes. With so few, pipelines have large bubbles.

Figures are also written to runs/bench/layouts.json. Other busy programs distort them; the tool warns of them.
"""

import os
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import OUT, ROOT, OtherPrograms, Out, cli, machine, warn_if_busy, write_json
from tools.benchmarks.jobs import layouts_seconds, write_model

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
SIZES = dict(vocab_size=2048, hidden_size=256, moe_intermediate_size=128, intermediate_size=512)
SIZES |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_hidden_layers=4)
SIZES |= dict(num_experts=16, num_experts_per_tok=4, max_position_embeddings=4096)
# Sizes of the model, and tokens: of the longest sample, about of a mini-batch, at most of a micro-batch.
FULL = SIZES, 512, 4096, 1024
SHORT = dict(num_hidden_layers=4, max_position_embeddings=128), 32, 128, 64


def main(
    processes: Annotated[int, typer.Option(min=1, max=4, help="Largest number of processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds: measurements of each layout.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps per round, after one warm-up step.")] = 2,
    short: Annotated[
        bool, typer.Option(help="One round on a tiny model, to test that everything runs.")
    ] = False,
    out: Out = OUT / "layouts.json",
) -> None:
    """Print tokens/s of each layout."""
    os.chdir(ROOT)
    from ranks import run_ranks  # of tests/distributed

    sizes, longest, num_tokens, max_tokens = SHORT if short else FULL
    rounds, steps = (1, 1) if short else (rounds, steps)
    lengths, others = mixed_lengths(longest, num_tokens), OtherPrograms()
    world_sizes = measurable(processes)
    found: dict[str, dict[str, Any]] = {
        name: {"processes": size, "tokens_per_s": []} for size in world_sizes for name in LAYOUTS[size]
    }
    with tempfile.TemporaryDirectory() as folder, tqdm(total=rounds * len(found), desc="layouts") as bar:
        model = f"{folder}/model"
        run_ranks(write_model, 1, Path(folder), model, sizes)
        for index in range(rounds):
            for size in world_sizes[:: 1 if index % 2 == 0 else -1]:
                names = list(LAYOUTS[size])[:: 1 if index % 2 == 0 else -1]
                splits = {
                    name: LAYOUTS[size][name] | {"max_tokens_per_microbatch": max_tokens} for name in names
                }
                arguments = (model, splits, lengths, steps)
                seconds = run_ranks(layouts_seconds, size, Path(folder), *arguments, timeout_s=1800)[0]
                for name, values in seconds.items():
                    found[name]["tokens_per_s"].append(sum(lengths) / statistics.median(values))
                    bar.update()
    other_cores = others.cores()
    show(found, sum(lengths), rounds, steps)
    warn_if_busy("layouts", other_cores)
    counts = {"rounds": rounds, "steps": steps, "other_cores": other_cores}
    write_json(out, {"machine": machine(), **counts, "sizes": sizes, "layouts": found})


def measurable(processes: int) -> list[int]:
    """Return the numbers of processes to measure: those with layouts, but on GPUs no more than devices."""
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


def show(found: Mapping[str, Mapping[str, Any]], num_tokens: int, rounds: int, steps: int) -> None:
    """Print the table: medians over the rounds, and median, minimum and maximum of the ratios."""
    typer.echo(f"\nRounds: {rounds}. Threads of each process: 1. Cores of this machine: {os.cpu_count()}.")
    rows: list[list[str]] = []
    for name, row in found.items():
        pairs = zip(row["tokens_per_s"], found[ONE]["tokens_per_s"], strict=True)
        ratios = [value / one for value, one in pairs]
        cells = [f"{of(ratios):.2f}" for of in (statistics.median, min, max)]
        rows.append([name, str(row["processes"]), f"{statistics.median(row['tokens_per_s']):,.0f}", *cells])
    title = f"training by layout, ratio to one process; steps of {num_tokens} tokens, {steps} in a round"
    show_table(title, ("layout", "processes", "tokens/s", "ratio", "min", "max"), rows)


if __name__ == "__main__":
    cli(main, __doc__)
