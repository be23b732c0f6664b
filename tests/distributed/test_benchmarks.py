"""The benchmarks run; their figures mean nothing here."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.runtime.process import Runtime
from tests.support.layout_cases import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_layouts_are_benchmarked(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tools.benchmarks.layouts", "--short", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    known = {name: layout for of_size in LAYOUTS.values() for name, layout in of_size.items()}
    assert set(figures["layouts"]) - {"one process"} <= set(known), (
        "each is compared with one process by a test"
    )
    assert {row["processes"] for row in figures["layouts"].values()} == {1, 2}
    for title in ("(a)", "(b)", "(c)", "(d)"):
        assert title in done.stdout
    assert all(row["num_padded_tokens"] >= row["num_tokens"] for row in figures["packing"].values())
    seconds = [*figures["lengths"]["seconds"].values(), *figures["experts"]["4"].values()]
    assert all(math.isfinite(value) and value > 0 for values in seconds for value in values)
    predicted = list(figures["lengths"]["predicted"].values())
    assert predicted == sorted(predicted)


def gpu_steps(runtime: Runtime, model: str) -> list[dict[str, Any]]:
    """On one process: what the benchmark measures on a GPU, of a tiny model."""
    from tools.benchmarks.gpu_step import measure_all

    rows = measure_all(runtime, model, [32, 64], 16, num_steps=2, needs_gpu=False)
    return [asdict(row) for row in rows]


def test_the_step_of_the_gpu_benchmark_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    rows = run_ranks(gpu_steps, 1, tmp_path, str(model))[0]
    sizes = [(preset, size) for preset in ("dppo_binary_tv", "dppo_topk_kl") for size in (32, 64)]
    assert [(row["objective"], row["num_tokens"]) for row in rows] == sizes
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert rows[1]["flops"] == 2 * rows[0]["flops"] and rows[0]["peak_bytes"] > 0
    assert rows[1]["planned_bytes"] > rows[0]["planned_bytes"] > 0


def shadow_steps(runtime: Runtime, folder: str) -> dict[str, Any]:
    """On one process: the steps of the benchmark of shadow masks."""
    from tools.benchmarks.shadow import measure

    return measure(runtime, folder, num_rounds=2, top_k=20, vocab_size=40, num_samples=4)


def test_steps_with_and_without_shadows_are_compared(tmp_path: Path) -> None:
    figures = run_ranks(shadow_steps, 1, tmp_path, str(tmp_path))[0]
    assert figures["num_shadows"] == 13
    for of in ("wall", "cpu"):
        pairs = figures[f"{of}_s"]
        assert figures[f"{of}_ratio"] == [a / b for a, b in zip(pairs["with"], pairs["without"], strict=True)]
        assert len(figures[f"{of}_ratio"]) == 2 and min(figures[f"{of}_ratio"]) > 0


def host_figures(runtime: Runtime, folder: str) -> dict[str, Any]:
    """On one process: the benchmark of the host's path, at sizes that rise evenly."""
    from tests.support.counted_bytes import tensor_work
    from tools.benchmarks.host import Measured, measure, memory_of_rank, time_of_rank
    from tools.benchmarks.host_path import Rollout, Step

    found, works = list[Measured](), list[dict[str, int]]()
    for num_tokens in (384, 640, 896):
        of_size = partial(measure, runtime, Path(folder) / str(num_tokens), 2, num_tokens, rounds=1)
        works.append(asdict(tensor_work(lambda of_size=of_size: found.append(of_size()))))
    linear = [
        Step(
            "s",
            "exposed",
            count,
            count * tokens,
            0.5,
            7.0,
            [count * tokens * 1e-7 * noise for noise in (9, 1, 0)],
        )
        for count, tokens in ((2, 384), (4, 8192), (256, 100))
    ]
    return {
        "steps": [asdict(step) for step in found[0].steps],
        "memory": [
            (each.total, each.bound) for each in (memory_of_rank(found[0], Rollout(), n) for n in (8, 1))
        ],
        "works": works,
        "sizes": [asdict(each.sizes) for each in found],
        "linear": [asdict(time_of_rank(step, Rollout())) for step in linear],
    }


def test_the_host_path_is_linear_in_tokens(tmp_path: Path) -> None:
    """By the tensors that its steps make, and the bytes of what passes, as its extrapolation has it."""
    figures = run_ranks(host_figures, 1, tmp_path, str(tmp_path))[0]
    for of in ("works", "sizes"):
        for name in figures[of][0]:
            small, middle, large = (each[name] for each in figures[of])
            assert large - middle == pytest.approx(middle - small, rel=0.02, abs=64), name
    assert len({work["operators"] for work in figures["works"]}) == 1, "none is for each token"
    whole_s = 256 * 8192 * 1e-7
    for of_rank in figures["linear"]:
        assert of_rank == pytest.approx({"alone_s": 0.5 * whole_s, "together_s": 7 * whole_s}, rel=1e-12)
    assert {step["where"] for step in figures["steps"]} == {"decoding process", "generation", "exposed"}
    for step in figures["steps"]:
        assert step["num_samples"] >= 2 and step["num_tokens"] >= 384 * step["num_samples"], step["name"]
        assert len(step["cpu_s"]) == 1 and min(step["cpu_s"]) >= 0, step["name"]
        assert step["alone"] + step["together"] > 0, step["name"]
    for total, bound in figures["memory"]:
        assert 0.5 * bound < total <= bound, "checks compare the bound with rollout.max_data_gib"
