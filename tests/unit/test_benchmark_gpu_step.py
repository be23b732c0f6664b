"""What tools/benchmarks/gpu_step.py counts and refuses; the steps themselves are in tests/distributed."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.gpu_rates import ASSUMED, GpuRates
from megatron_dppo.plan.job import Job
from tools.benchmarks.gpu_step import (
    FITTED,
    PEAK_TFLOPS,
    QWEN3_30B_A3B,
    Measured,
    fitted_rates,
    peak_tflops_of,
    planned_bytes,
    planned_job,
    show,
    with_layers,
)

ROOT = Path(__file__).parents[2]


def test_flops_of_one_layer_of_qwen3_30b_a3b() -> None:
    hf = QWEN3_30B_A3B | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    cost = SampleCost.of_model(model_shape(hf))
    attention, router = 2048 * 128 * (32 + 4 + 4 + 32), 2048 * 128
    experts, head = 8 * 3 * 2048 * 768, 2048 * 151936
    weights = attention + router + experts + head
    # Two products with the 1024 tokens that come before, on average; backward is twice the forward.
    scores = 3 * 2 * 2 * 32 * 128 * 1024
    assert 4 * cost.of(2048) == pytest.approx(4 * 2048 * (6 * weights + scores))


def test_the_planned_memory_is_of_weights_optimizer_and_a_chunk_of_logits(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config | QWEN3_30B_A3B | {"norm_topk_prob": True}))
    planned = {tokens: planned_bytes(str(tmp_path), [2048] * (tokens // 2048), 20) for tokens in (8192, 16384)}
    num_parameters = 2 * 151936 * 2048 + 128 * 3 * 2048 * 768 + 2048 * 128 * (32 + 4 + 4 + 32) + 2048 * 128
    states = (2 + 4 + 12) * num_parameters  # bfloat16 weights, float32 gradients, master copy and moments
    loss = 2**30  # logits that exist at once
    assert states + loss < planned[8192] < 1.3 * (states + loss)
    assert planned[16384] - planned[8192] < 8192 * 151936 * 2  # the logits of as many tokens


def measured_steps(folder: Path) -> list[tuple[Job, float]]:
    """Return the steps of the guide's table, with their seconds."""
    text = (ROOT / "examples/guides/gpu_measurements.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([\d,]+) \| ([\d.]+) \| [\d,]+ \|", text, re.MULTILINE)
    assert len(rows) == 5
    found = list[tuple[Job, float]]()
    for layers, tokens, milliseconds in rows:
        model = folder / layers
        model.mkdir(exist_ok=True)
        sizes = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": int(layers)}
        (model / "config.json").write_text(json.dumps(QWEN3_30B_A3B | sizes | {"norm_topk_prob": True}))
        lengths = [2048] * (int(tokens.replace(",", "")) // 2048)
        found.append((planned_job(str(model), lengths, 0), float(milliseconds) / 1e3))
    return found


def test_the_plan_estimates_the_measured_steps_and_its_rates_are_fitted_to_them(tmp_path: Path) -> None:
    steps = measured_steps(tmp_path)
    for job, seconds in steps:
        assert step_time(job, job.layout).total == pytest.approx(seconds, rel=0.01)
    assert fitted_rates(steps) == {name: pytest.approx(getattr(ASSUMED, name), rel=0.002) for name in FITTED}
    one_depth = [step for step in steps if step[0].shape.sizes.num_layers == 1]
    assert fitted_rates(one_depth) == fitted_rates([]) == {}


def test_rates_are_found_again_from_steps_that_they_make(tmp_path: Path) -> None:
    rates: dict[str, Any] = {
        "layer_flops_per_s": 2e14,
        "output_flops_per_s": 7e14,
        "update_parameters_per_s": 5e10,
    }
    steps = list[tuple[Job, float]]()
    for job, _ in measured_steps(tmp_path):
        own = replace(job, machine=replace(job.machine, rates=GpuRates(**rates)))
        steps.append((job, step_time(own, own.layout).total))
    assert fitted_rates(steps) == pytest.approx(rates)


def test_speed_and_share_of_the_peak_are_of_the_median_step() -> None:
    row = Measured("dppo_binary_tv", 8192, flops=4e14, seconds=(9.0, 0.5, 0.4), peak_bytes=0, planned_bytes=0)
    assert row.tokens_per_s == pytest.approx(16384)
    assert row.mfu(1e15) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_the_peak_goes_by_the_name_of_the_device(device: str, peak: float | None) -> None:
    assert peak_tflops_of(device) == peak


def test_each_name_with_a_peak_is_found_before_one_that_it_contains() -> None:
    assert all(peak_tflops_of(name) == peak for name, peak in PEAK_TFLOPS.items())


def test_a_step_that_does_not_fit_and_an_unknown_peak_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Measured("dppo_binary_tv", 8192, 4e14, (0.5, 0.5), 2**30, 2**31),
        Measured("dppo_topk_kl", 32768, 2e15, (), 2**36, 2**37),
    ]
    show(rows, "some device", None, 2048, "a model")
    shown = capsys.readouterr().out
    assert "does not fit" in shown and "16,384" in shown and "--peak-tflops" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [((), "needs a GPU"), (("--tokens", "100", "--sequence-length", "64"), "expected a multiple")],
)
def test_unmeasurable_options_are_refused_in_one_line(flags: tuple[str, ...], words: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tools.benchmarks.gpu_step", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_config_with_fewer_layers_has_as_many_kinds_of_layers() -> None:
    hf = {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "b"],
        "mlp_only_layers": [],
        "eos_token_id": [1, 2],
    }
    found = with_layers(hf | {"quantization_config": {"quant_method": "mxfp4"}}, 3)
    assert found == hf | {"num_hidden_layers": 3, "layer_types": ["a", "b", "a"]}
