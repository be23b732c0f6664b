"""Measures the cost of tracking.shadow, which evaluates other presets in each gradient step: with / without.

    python -m tools.benchmarks.shadow
    python -m tools.benchmarks.shadow --rounds 11 --top-k 0

Two real actors with the same random weights and the quickstart's sizes take the same step on one packed
micro-batch of random samples: one with tracking.shadow, one without. Every second round runs in reverse order.
The relative cost is largest for small models, and the quickstart's model is the smallest in the examples. With
--top-k the batch carries Top-K log-probs, and Top-K presets are evaluated too. The table shows medians and
ranges over the rounds, of wall clock seconds and of this process's CPU seconds, which other programs disturb
less. The benchmark uses one process with one thread.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dppo.runtime.process import Runtime, quiet_library_warnings, start, stop
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import (
    OUT,
    ROOT,
    OtherPrograms,
    cli,
    machine,
    spread,
    warn_if_busy,
    write_json,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
NUM_SAMPLES, SAMPLE_TOKENS = 128, 26  # sizes of a gradient step of the quickstart


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Measured steps of each kind.")] = 7,
    top_k: Annotated[int, typer.Option(min=0, help="Columns of Top-K log-probs; 0 for no Top-K.")] = 20,
    vocab_size: Annotated[int, typer.Option(min=32, help="Vocabulary size of the model.")] = 274,
    out: Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")] = OUT
    / "shadow.json",
) -> None:
    """Print a table of seconds and ratios."""
    quiet_library_warnings()
    runtime, others = start(), OtherPrograms()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(runtime, folder, rounds, top_k, vocab_size)
    stop()
    wall, cpu = figures["wall_ratio"], figures["cpu_ratio"]
    show_table(
        f"a step of {figures['num_tokens']} tokens, {figures['num_shadows']} shadow presets",
        ("", "without, s", "with, s", "with / without"),
        [
            ("clock", *(spread(figures["wall_s"][kind], 4) for kind in ("without", "with")), spread(wall, 4)),
            ("CPU", *(spread(figures["cpu_s"][kind], 4) for kind in ("without", "with")), spread(cpu, 4)),
        ],
    )
    warn_if_busy("the steps", others.cores())
    write_json(ROOT / out, {"machine": machine(), **figures})


def measure(
    runtime: Runtime, folder: str, num_rounds: int, top_k: int, vocab_size: int, num_samples: int = NUM_SAMPLES
) -> dict[str, Any]:
    """Measure the seconds of each step of both kinds, and the ratios of each round."""
    from tools.benchmarks.jobs import build_actor, random_samples, step_of, write_model

    write_model(runtime, f"{folder}/model", SIZES | {"vocab_size": vocab_size})
    tables: dict[str, Any] = {"rollout": {"num_topk_log_probs": top_k}}
    actors = {
        kind: build_actor(
            runtime,
            f"{folder}/model",
            {"max_tokens_per_microbatch": num_samples * SAMPLE_TOKENS},
            **tables,
            tracking={"shadow": kind == "with"},
        )
        for kind in ("without", "with")
    }
    batch = step_of([random_samples([SAMPLE_TOKENS] * num_samples, vocab_size, top_k)])
    seconds: dict[str, dict[str, list[float]]] = {
        of: {kind: [] for kind in actors} for of in ("wall_s", "cpu_s")
    }
    num_shadows = 0
    for index in range(-1, num_rounds):  # the first warms up
        for kind in list(actors)[:: 1 if index % 2 == 0 else -1]:
            runtime.synchronize()
            began, began_cpu = time.perf_counter(), time.process_time()
            step = actors[kind].train_step(batch, is_first=False)
            runtime.synchronize()
            elapsed, elapsed_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            num_shadows = max(num_shadows, sum(name.endswith("/agreement") for name in step.metrics.values()))
            if index >= 0:
                seconds["wall_s"][kind].append(elapsed)
                seconds["cpu_s"][kind].append(elapsed_cpu)
    ratios = {
        of: [a / b for a, b in zip(pair["with"], pair["without"], strict=True)] for of, pair in seconds.items()
    }
    return {
        **seconds,
        "wall_ratio": ratios["wall_s"],
        "cpu_ratio": ratios["cpu_s"],
        "median_wall_ratio": statistics.median(ratios["wall_s"]),
        "median_cpu_ratio": statistics.median(ratios["cpu_s"]),
        "num_tokens": num_samples * SAMPLE_TOKENS,
        "num_shadows": num_shadows,
    }


if __name__ == "__main__":
    cli(main, __doc__)
