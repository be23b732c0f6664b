"""Measures a gradient step with shared prefixes (`parallel.share_prefixes`) and without, interleaved.

    python -m tools.benchmarks.shared_prefixes
    python -m tools.benchmarks.shared_prefixes --gpu       two layers of Qwen3-30B-A3B in bfloat16, on a GPU
    python -m tools.benchmarks.shared_prefixes --short     one round on a tiny model; its figures mean nothing

One process with one thread trains the random Qwen3-MoE of the `layouts` benchmark in float32, with the real
actor. Samples are like the quickstart's, like responses to word problems, like a conversation of eight turns
with a branch at each, and like conversations whose turns are samples, each with the history before it. Both
actors get the same samples, and take turns at every step. Memory is what a step allocates at most, on a GPU, in
addition to weights and optimizer.

Figures are also written to runs/bench/shared_prefixes.json. Other busy programs distort them; the tool warns of
them.
"""

import gc
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Sample
from tools.benchmarks.benchmarking import OUT, ROOT, OtherPrograms, Out, cli, warn_if_busy, write_json
from tools.benchmarks.gpu_step import QWEN3_30B_A3B
from tools.benchmarks.jobs import build_actor, random_samples, step_seconds, write_model
from tools.benchmarks.layouts import FULL, SHORT

TURN, MAX_TOKENS = 96, 4096
# Groups, and for each sample of a group: its tokens, and those that it has in common with the one before it.
WORKLOADS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "quickstart": (16, [(24, 7)] * 8),
    "word problems": (4, [(240, 140)] * 8),
    "eight turns with branches": (1, [(8 * TURN, turn * TURN) for turn in range(8, 0, -1)]),
    "a sample for each turn": (2, [(turn * TURN, (turn - 1) * TURN) for turn in range(1, 9)]),
}
# The same for a GPU; a long prompt, and short ones that share little.
GPU_WORKLOADS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "long prompts": (2, [(2048, 1536)] * 8),
    "short prompts": (2, [(2048, 256)] * 8),
    "eight turns with branches": (1, [(8 * 512, turn * 512) for turn in range(8, 0, -1)]),
    "a sample for each turn": (1, [(turn * 512, (turn - 1) * 512) for turn in range(1, 9)]),
}
GPU_MAX_TOKENS = 32768


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each actor, after one warm-up step.")] = 7,
    gpu: Annotated[bool, typer.Option("--gpu", help="Layers of Qwen3-30B-A3B on a GPU.")] = False,
    short: Annotated[bool, typer.Option(help="One round on a tiny model, to test that it runs.")] = False,
    out: Out = OUT / "shared_prefixes.json",
) -> None:
    """Print the seconds of a step with and without sharing."""
    os.chdir(ROOT)
    from tests.support.ranks import run_ranks

    if gpu and not torch.cuda.is_available():
        typer.echo("--gpu: torch found no GPU", err=True)
        raise typer.Exit(2)
    sizes, others = (SHORT if short else FULL)[0] | {"max_position_embeddings": 4096}, OtherPrograms()
    if gpu:
        sizes = QWEN3_30B_A3B | {"num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as name:
        run_ranks(write_model, 1, Path(name), f"{name}/model", sizes)
        of_gpu = (GPU_WORKLOADS, GPU_MAX_TOKENS, "bfloat16")
        arguments = (f"{name}/model", 1 if short else rounds, *(of_gpu if gpu else ()))
        found = run_ranks(measure, 1, Path(name), *arguments, timeout_s=1800)[0]
    rows: list[list[str]] = []
    for title, row in found.items():
        ratios = [one / shared for one, shared in zip(row["alone_s"], row["shared_s"], strict=True)]
        medians = [f"{statistics.median(row[key]):.3g}" for key in ("alone_s", "shared_s")]
        memory = [f"{row[key] / 2**30:.1f}" if gpu else "-" for key in ("alone_bytes", "shared_bytes")]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([title, f"{row['num_tokens']:,}", f"{row['num_forwarded']:,}", *medians, spread, *memory])
    names = ("", "tokens", "distinct", "alone, s", "shared, s", "ratio", "alone, GiB", "shared, GiB")
    show_table("a gradient step", names, rows)
    other_cores = others.cores()
    warn_if_busy("shared prefixes", other_cores)
    write_json(out, {"other_cores": other_cores, "workloads": found})


def measure(
    runtime: Runtime,
    model: str,
    rounds: int,
    workloads: dict[str, tuple[int, list[tuple[int, int]]]] = WORKLOADS,
    max_tokens: int = MAX_TOKENS,
    dtype: str = "float32",
) -> dict[str, dict[str, Any]]:
    """Time gradient steps of two actors on the same samples, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for title, (num_groups, group) in workloads.items():
        steps: dict[bool, Any] = {}
        for is_shared in (False, True):
            parallel: dict[str, Any] = {"max_tokens_per_microbatch": max_tokens, "share_prefixes": is_shared}
            actor = build_actor(runtime, model, parallel, dtype)
            samples = tree_samples(num_groups, group, actor.hf["vocab_size"])
            shape = BatchShape("token_mean", max_tokens, max_tokens, shares_prefixes=is_shared)
            (batch,), report = train_batches([samples], shape, actor.data_parallel)
            steps[is_shared] = actor, batch, report
        seconds: dict[bool, list[float]] = {False: [], True: []}
        peaks = dict[bool, int]()
        for _ in range(rounds + 1):
            for is_shared, (actor, batch, _) in steps.items():
                before = _allocated_bytes(runtime)
                seconds[is_shared].append(step_seconds(runtime, actor, batch))
                peaks[is_shared] = runtime.peak_bytes() - before
        found[title] = {
            "num_tokens": steps[True][2].num_tokens,
            "num_forwarded": steps[True][2].num_forwarded_tokens,
            "alone_s": seconds[False][1:],
            "shared_s": seconds[True][1:],
            "alone_bytes": peaks[False],
            "shared_bytes": peaks[True],
        }
        del actor, steps
        gc.collect()
    return found


def _allocated_bytes(runtime: Runtime) -> int:
    """Return the GPU's allocated bytes, and start to look for a peak; zero on a CPU."""
    if runtime.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(runtime.device)
    return torch.cuda.memory_allocated(runtime.device)


def tree_samples(num_groups: int, group: Sequence[tuple[int, int]], vocab_size: int) -> list[Sample]:
    """Return samples of groups, each with tokens of the one before it; only its other tokens learn."""
    samples = random_samples([length for length, _ in group] * num_groups, vocab_size)
    for index, sample in enumerate(samples):
        place, of_group = index % len(group), index // len(group)
        common = group[place][1]
        if place:
            sample.tokens[:common] = samples[index - 1].tokens[:common]
        is_own = torch.arange(sample.prompt_length, sample.tokens.numel()) >= common
        samples[index] = replace(sample, group_id=str(of_group), loss_mask=is_own)
    return samples


if __name__ == "__main__":
    cli(main, __doc__)
