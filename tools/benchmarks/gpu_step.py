"""Measures a training step with layers of Qwen3-30B-A3B on one GPU: tokens/s, share of the GPU's peak, memory.

    make gpu
    python -m tools.benchmarks.gpu_step --tokens 16384 --sequence-length 4096
    python -m tools.benchmarks.gpu_step --layers 1 --layers 4
    python -m tools.benchmarks.gpu_step --config models/Qwen3.5-35B-A3B/config.json --layers 4

The models have one and three layers by default and random bfloat16 weights; --config takes another model's
sizes. They run with our torch spec and, if it is usable, with Transformer Engine's spec. The real actor takes
the steps: forward, loss, backward and update, on packed sequences in one micro-batch. With so few layers, the
output layer and the loss are most of the work.

The steps of the torch spec give the rates of layers, output layer and update, by least squares. With the speed
of copies from page-locked memory they go to --rates, from where `megatron-dppo plan` takes them.

MFU is the ratio of the floating-point operations of forward and backward to the GPU's peak in the same time.
Operations are counted as in work balancing (6 per token and multiplied weight, and causal attention). The peak
is the data sheet's value for dense bfloat16, selected by device name. Memory is the peak that PyTorch allocated
during the steps. The next column is the estimate of `megatron-dppo plan`, without its reserve.

Figures are also written to runs/bench/gpu_step.json.
"""

import gc
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.architectures.megatron_options import LayerSpecName
from megatron_dppo.checks import model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.plan import Machine
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.gpu_rates import RATES_FILE, GpuRates, write_rates
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.runtime.process import Runtime, gpu_libraries, quiet_library_warnings, start, stop
from tools.benchmarks.benchmarking import OUT, ROOT, Out, cli, write_json
from tools.benchmarks.jobs import batch_of, build_actor, step_seconds, write_model

# Dense bfloat16 TFLOP/s from data sheets. The first entry with a name contained in the device's name is used.
PEAK_TFLOPS = {"GB200": 2500.0, "B200": 2250.0, "GH200": 989.4, "H200 NVL": 835.5, "H200": 989.4}
PEAK_TFLOPS |= {"H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.4, "H800": 989.4}
PEAK_TFLOPS |= {"A100": 312.0, "A800": 312.0, "L40S": 362.0}
QWEN3_30B_A3B = dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768)
QWEN3_30B_A3B |= dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128)
QWEN3_30B_A3B |= dict(num_experts_per_tok=8, max_position_embeddings=40960)
OBJECTIVES = {"dppo_binary_tv": 0, "dppo_topk_kl": 20}  # preset and its top_k; 0 for no Top-K
DTYPE = "bfloat16"
LAYERS = (1, 3)
FITTED = ("layer_flops_per_s", "output_flops_per_s", "update_parameters_per_s")
TOKENS = (8192, 16384, 32768)
WARM_UP = 2  # warm-up steps


@dataclass(frozen=True)
class Measured:
    """Gradient steps of one size with one objective."""

    objective: str
    num_tokens: int  # tokens per step
    flops: float  # floating-point operations of forward and backward per step
    seconds: tuple[float, ...]  # seconds of each step; empty if the step did not fit into memory
    peak_bytes: int
    planned_bytes: int  # estimate of `megatron-dppo plan`
    layer_spec: LayerSpecName = "torch"
    num_layers: int = 1

    @property
    def median_s(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the median step."""
        return self.num_tokens / self.median_s

    def mfu(self, peak_flops: float) -> float:
        """Return the share of a peak (operations per second) that the median step reaches."""
        return self.flops / self.median_s / peak_flops


def main(
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help=f"Tokens of a step (repeatable). [default: {TOKENS}]")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=16, help="Tokens of each packed sequence.")] = 2048,
    layers: Annotated[
        list[int] | None, typer.Option(min=1, help=f"Layers of the model (repeatable). [default: {LAYERS}]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help=f"Measured steps, after {WARM_UP} warm-up steps.")] = 5,
    peak_tflops: Annotated[float | None, typer.Option(help="Dense bfloat16 peak. [default: by name]")] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Another model's config.json.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for the temporary random checkpoint.")] = None,
    out: Out = OUT / "gpu_step.json",
    rates: Annotated[Path, typer.Option(help="File of the rates, from the repository.")] = RATES_FILE,
) -> None:
    """Print one table."""
    counts = sorted(tokens or TOKENS)
    odd = [count for count in counts if count % sequence_length]
    if odd:
        expected = f"expected a multiple of --sequence-length, {sequence_length}"
        typer.echo(f"--tokens: found {odd[0]}; {expected}", err=True)
        raise typer.Exit(2)
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs a GPU, and torch found none", err=True)
        raise typer.Exit(2)
    of_model = QWEN3_30B_A3B if config is None else json.loads(config.read_text(encoding="utf-8"))
    if config is not None and "model_type" not in of_model:
        typer.echo(f"--config: found no model_type in {config}; expected a published config.json", err=True)
        raise typer.Exit(2)
    quiet_library_warnings()
    runtime, rows, found = start(), list[Measured](), dict[str, float]()
    device = torch.cuda.get_device_name()
    peak = peak_tflops or peak_tflops_of(device)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        samples = list[tuple[Job, float]]()
        for num_layers in layers or LAYERS:
            model = f"{name}/{num_layers}"
            write_model(runtime, model, with_layers(of_model, num_layers))
            measured = measure_all(runtime, model, counts, sequence_length, steps)
            samples += [
                (planned_job(model, [sequence_length] * (row.num_tokens // sequence_length), 0), row.median_s)
                for row in measured
                if row.seconds and (row.layer_spec, row.objective) == ("torch", "dppo_binary_tv")
            ]
            rows += [replace(row, num_layers=num_layers) for row in measured]
        found = fitted_rates(samples)
    found |= {"host_bytes_per_s": host_bytes_per_s(runtime)}
    stop()
    show(rows, device, peak, sequence_length, "Qwen3-30B-A3B" if config is None else str(config))
    write_rates(ROOT / rates, device, found)
    typer.echo(f"rates: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}; in {ROOT / rates}")
    shape = {"sequence_length": sequence_length, "device": device, "peak_tflops": peak}
    write_json(ROOT / out, {**shape, "rates": found, "rows": [asdict(row) for row in rows]})


def with_layers(hf: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config.json with only the first layers, and with weights that are not quantised."""
    whole, found = hf.get("num_hidden_layers"), dict[str, Any]()
    for key in hf.keys() - {"quantization_config"}:
        is_of_layers = isinstance(hf[key], list) and len(hf[key]) == whole
        found[key] = hf[key][:num_layers] if is_of_layers else hf[key]
    return found | {"num_hidden_layers": num_layers}


def fitted_rates(samples: Sequence[tuple[Job, float]]) -> dict[str, float]:
    """Return the rates with which the plan's estimate of the steps is closest to their seconds.

    An estimate is a sum of work divided by rates, so this is a least-squares fit, of relative errors. It needs
    steps of two numbers of layers, and of two numbers of tokens; without them, nothing is returned.
    """
    work = np.array([[_work(job, name) for name in FITTED] for job, _ in samples]).reshape(-1, len(FITTED))
    relative = work / np.array([seconds for _, seconds in samples]).reshape(-1, 1)
    scale = relative.max(axis=0, initial=1e-300)
    inverse, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(samples)), rcond=1e-6)
    if rank < len(FITTED) or not (inverse > 0).all():
        return {}
    return {name: float(size / share) for name, size, share in zip(FITTED, scale, inverse, strict=True)}


def _work(job: Job, name: str) -> float:
    """Return the work that a rate divides: the seconds of the step if it is 1, and the others infinite."""
    rates: dict[str, Any] = {**dict.fromkeys(FITTED, math.inf), name: 1.0}
    unit = GpuRates(**rates)
    return step_time(replace(job, machine=replace(job.machine, rates=unit)), job.layout).total


def host_bytes_per_s(runtime: Runtime, num_bytes: int = 2**30) -> float:
    """Return the speed of copies from page-locked memory to the GPU and back."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=runtime.device)
    for _ in range(2):  # the first one warms up
        torch.cuda.synchronize()
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        host.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
    return 2 * num_bytes / (time.perf_counter() - started)


def peak_tflops_of(device: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a device, or `None` for an unknown name."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def measure_all(
    runtime: Runtime, model: str, token_counts: Sequence[int], sequence_length: int, num_steps: int
) -> list[Measured]:
    """Measure steps on one packed micro-batch for each layer spec, objective and size (ascending).

    Sizes after the first that does not fit are left out.
    """
    rows: list[Measured] = []
    specs: list[LayerSpecName] = ["torch"]
    if gpu_libraries().transformer_engine.is_usable:
        specs.append("transformer_engine")
    for spec, (preset, top_k) in itertools.product(specs, OBJECTIVES.items()):
        algorithm = {"preset": preset} | ({"top_k": top_k} if top_k else {})
        tables = {"algorithm": algorithm, "rollout": {"num_topk_log_probs": top_k}}
        parallel = {"max_tokens_per_microbatch": max(token_counts)}
        actor = build_actor(runtime, model, parallel, DTYPE, spec, **tables)
        for num_tokens in token_counts:
            lengths = [sequence_length] * (num_tokens // sequence_length)
            batch = batch_of(runtime, actor, lengths, num_tokens, top_k)
            if runtime.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(runtime.device)
            try:
                seconds = [step_seconds(runtime, actor, batch) for _ in range(WARM_UP + num_steps)]
            except torch.OutOfMemoryError:
                seconds = []
            flops, taken = sum(map(actor.data_parallel.cost.of, lengths)), tuple(seconds[WARM_UP:])
            sizes = runtime.peak_bytes(), planned_bytes(model, lengths, top_k, spec)
            rows.append(Measured(preset, num_tokens, flops, taken, *sizes, spec))
            if not seconds:
                break
        del actor
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def planned_bytes(model: str, lengths: Sequence[int], top_k: int, layer_spec: LayerSpecName = "torch") -> int:
    """Return the peak bytes that `plan` predicts for a step on one micro-batch of equally long sequences."""
    job = planned_job(model, lengths, top_k, layer_spec)
    moments = memory_of(job, job.layout).worst.moments
    parts = (moments[moment].items() for moment in ("loss", "backward", "step"))
    return max(sum(size for name, size in sizes if name != "reserve") for sizes in parts)


def planned_job(model: str, lengths: Sequence[int], top_k: int, layer_spec: LayerSpecName = "torch") -> Job:
    """Return the job of a step on one micro-batch of equally long sequences, as `plan` takes it."""
    rollout = dict(engine="sglang", prompts_per_rollout=len(lengths), samples_per_prompt=1)
    tables = {
        "model": {"load": model, "dtype": DTYPE, "layer_spec": layer_spec},
        "parallel": {"max_tokens_per_microbatch": sum(lengths)},
        "data": {"max_prompt_tokens": 1},
        "rollout": rollout | dict(max_response_tokens=lengths[0] - 1, num_topk_log_probs=top_k),
        "algorithm": {"minibatches_per_rollout": 1},
    }
    config = Config.model_validate(tables)
    return Job.of(config, model_facts(config, 1), Machine(num_gpus=1, gpu_bytes=10**12))


def show(rows: Sequence[Measured], device: str, peak: float | None, sequence_length: int, model: str) -> None:
    """Print the table, and the peak that it assumes."""
    assumed = f"{peak:,.1f} TFLOP/s, dense bfloat16" if peak else "not known; give --peak-tflops for MFU"
    typer.echo(f"\n{device}; its peak: {assumed}")
    cells: list[list[str]] = []
    for row in rows:
        speed = ["does not fit", "-", "-"]
        if row.seconds:
            milliseconds = f"{row.median_s * 1e3:,.1f}"
            speed = [milliseconds, f"{row.tokens_per_s:,.0f}", f"{row.mfu(peak * 1e12):.1%}" if peak else "-"]
        memory = (f"{size / 2**30:.1f}" for size in (row.peak_bytes, row.planned_bytes))
        names = [row.layer_spec, row.objective, str(row.num_layers)]
        cells.append([*names, f"{row.num_tokens:,}", *speed, *memory])
    title = f"training step, some layers of {model}, sequences of {sequence_length} tokens"
    names = ("layer spec", "objective", "layers", "tokens", "ms", "tokens/s", "MFU", "peak GiB", "planned")
    show_table(title, names, cells)


if __name__ == "__main__":
    cli(main, __doc__)
