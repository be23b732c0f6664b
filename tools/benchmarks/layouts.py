"""Measures training speed by layout: tokens/s of each layout, and the ratio to one process.

    make bench
    python -m tools.benchmarks.layouts --processes 4
    python -m tools.benchmarks.layouts --short        one round on a tiny model; its figures mean nothing

The layouts are those that a test compares with one process (tests/support/layout_cases.py). A random
Qwen3-MoE (hidden 256, 4 layers, 16 experts with top-4 routing, vocabulary 2048) in float32 trains with the real
actor. Every process has one thread, and all share this machine. Each round visits every layout, every second
round in reverse order. Each ratio compares two figures of one round. A mini-batch has about four micro-batches
on one process and two on each of two data-parallel processes. With so few, pipelines have large bubbles.

Figures are also written to runs/bench/layouts.json. Other busy programs distort them; the tool warns of them.
"""

import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_dppo.analysis.pages import show_table
from tools.benchmarks.benchmarking import OUT, ROOT, OtherPrograms, Out, cli, warn_if_busy, write_json
from tools.benchmarks.jobs import layouts_seconds, write_model

ONE = "one process"
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
    short: Annotated[bool, typer.Option(help="One round on a tiny model, to test that it runs.")] = False,
    out: Out = OUT / "layouts.json",
) -> None:
    """Print tokens/s of each layout."""
    os.chdir(ROOT)
    from tests.support.layout_cases import LAYOUTS  # of tests/distributed
    from tests.support.ranks import run_ranks

    (sizes, longest, num_tokens, max_tokens), others = SHORT if short else FULL, OtherPrograms()
    rounds, steps = (1, 1) if short else (rounds, steps)
    lengths = mixed_lengths(longest, num_tokens)
    num_devices = torch.accelerator.device_count() or processes  # 0 on a CPU: processes then share the cores
    if num_devices < processes:
        typer.echo(f"found {num_devices} devices: layouts on more processes are left out")
    layouts = {1: {ONE: {}}} | {n: of for n, of in LAYOUTS.items() if n <= min(processes, num_devices)}
    found: dict[str, dict[str, Any]] = {
        name: {"processes": num, "tokens_per_s": []} for num, of in layouts.items() for name in of
    }
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), {"max_tokens_per_microbatch": max_tokens}
        run_ranks(write_model, 1, folder, f"{name}/model", sizes)
        for index in range(rounds):
            typer.echo(f"round {index + 1} of {rounds}")
            order = 1 if index % 2 == 0 else -1
            for num, of in list(layouts.items())[::order]:
                limited = {layout: split | limit for layout, split in list(of.items())[::order]}
                arguments = (f"{name}/model", limited, lengths, steps)
                taken = run_ranks(layouts_seconds, num, folder, *arguments, timeout_s=1800)[0]
                for layout, seconds in taken.items():
                    found[layout]["tokens_per_s"].append(sum(lengths) / statistics.median(seconds))
    other_cores, rows = others.cores(), list[list[str]]()
    for name, row in found.items():
        pairs = zip(row["tokens_per_s"], found[ONE]["tokens_per_s"], strict=True)
        ratios = [value / one for value, one in pairs]
        cells = [f"{of(ratios):.2f}" for of in (statistics.median, min, max)]
        rows.append([name, str(row["processes"]), f"{statistics.median(row['tokens_per_s']):,.0f}", *cells])
    title = f"training, ratio to one process; {rounds} rounds of {steps} steps of {sum(lengths)} tokens"
    show_table(title, ("layout", "processes", "tokens/s", "ratio", "min", "max"), rows)
    warn_if_busy("layouts", other_cores)
    counts = {"rounds": rounds, "steps": steps, "other_cores": other_cores, "sizes": sizes}
    write_json(out, {**counts, "layouts": found})


def mixed_lengths(longest: int, num_tokens: int) -> list[int]:
    """Return log-uniform lengths from longest / 16 to longest, then the longest. The seed is fixed."""
    draw, lengths = random.Random(0), list[int]()
    while sum(lengths) < num_tokens:
        lengths.append(max(10, round(longest * 2.0 ** draw.uniform(-4, 0))))
    return [*lengths, longest]


if __name__ == "__main__":
    cli(main, __doc__)
