"""The benchmarks run; their figures mean nothing here."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.runtime.process import Runtime
from tests.support.layout_cases import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model
from tests.support.tiny_families import config_of

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
    speeds = [speed for row in figures["layouts"].values() for speed in row["tokens_per_s"]]
    assert all(math.isfinite(speed) and speed > 0 for speed in speeds)


def gpu_steps(runtime: Runtime, model: str) -> list[dict[str, Any]]:
    """On one process: what the benchmark measures on a GPU, of a tiny model."""
    from tools.benchmarks.gpu_step import measure_all

    rows = measure_all(runtime, model, [32, 64], 16, num_steps=2)
    return [asdict(row) for row in rows]


def gpu_steps_of_config(runtime: Runtime, folder: str, hf: dict[str, Any]) -> list[dict[str, Any]]:
    """On one process: the same of the first two layers of a config.json."""
    from tools.benchmarks.gpu_step import with_layers
    from tools.benchmarks.jobs import write_model as write_config

    write_config(runtime, folder, with_layers(hf, 2))
    return gpu_steps(runtime, folder)


def test_the_step_of_the_gpu_benchmark_runs_with_another_config(tmp_path: Path) -> None:
    hf = config_of("GptOssForCausalLM").to_dict()
    rows = run_ranks(gpu_steps_of_config, 1, tmp_path, str(tmp_path / "model"), hf)[0]
    assert [row["num_tokens"] for row in rows] == [32, 64, 32, 64]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 2


def test_the_step_of_the_gpu_benchmark_runs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=1)
    rows = run_ranks(gpu_steps, 1, tmp_path, str(model))[0]
    sizes = [(preset, size) for preset in ("dppo_binary_tv", "dppo_topk_kl") for size in (32, 64)]
    assert [(row["objective"], row["num_tokens"]) for row in rows] == sizes
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert rows[1]["flops"] == 2 * rows[0]["flops"] and rows[0]["peak_bytes"] > 0
    assert rows[1]["planned_bytes"] > rows[0]["planned_bytes"] > 0
