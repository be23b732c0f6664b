"""Measures a training step with layers of Qwen3-30B-A3B on one GPU: tokens/s, share of the GPU's peak, memory.

    make gpu
    python -m tools.benchmarks.gpu_step --tokens 16384 --sequence-length 4096
    python -m tools.benchmarks.gpu_step --layers 3

The model has one layer by default and random bfloat16 weights. It runs with our torch spec and, if it is
usable, with Transformer Engine's spec. The real actor takes the steps: forward, loss, backward and update, on
packed sequences in one micro-batch. With so few layers, the output layer and the loss are most of the work, so
the figures do not predict the complete model. --layers shows the cost of further layers.

MFU is the ratio of the floating-point operations of forward and backward to the GPU's peak in the same time.
Operations are counted as in work balancing (6 per token and multiplied weight, and causal attention). The peak
is the data sheet's value for dense bfloat16, selected by device name. Memory is the peak that PyTorch allocated
during the steps. The next column is the estimate of `megatron-dppo plan`, without its reserve.

Figures are also written to runs/bench/gpu_step.json.
"""

import gc
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from megatron_dppo.architectures.megatron_options import LayerSpecName
from megatron_dppo.checks import model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.plan import Machine
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.runtime.process import Runtime, gpu_libraries, quiet_library_warnings, start, stop
from megatron_dppo.runtime.tables import show_table
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

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the median step."""
        return self.num_tokens / statistics.median(self.seconds)

    def mfu(self, peak_flops: float) -> float:
        """Return the share of a peak (operations per second) that the median step reaches."""
        return self.flops / statistics.median(self.seconds) / peak_flops


def main(
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help=f"Tokens of a step (repeatable). [default: {TOKENS}]")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=16, help="Tokens of each packed sequence.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help=f"Measured steps, after {WARM_UP} warm-up steps.")] = 5,
    peak_tflops: Annotated[float | None, typer.Option(help="Dense bfloat16 peak. [default: by name]")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for the temporary random checkpoint.")] = None,
    out: Out = OUT / "gpu_step.json",
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
    quiet_library_warnings()
    runtime, sizes = start(), QWEN3_30B_A3B | {"num_hidden_layers": layers}
    device = torch.cuda.get_device_name()
    peak = peak_tflops or peak_tflops_of(device)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        write_model(runtime, f"{name}/model", sizes)
        rows = measure_all(runtime, f"{name}/model", counts, sequence_length, steps)
    stop()
    show(rows, device, peak, layers, sequence_length)
    shape = {"layers": layers, "sequence_length": sequence_length, "device": device, "peak_tflops": peak}
    write_json(ROOT / out, {**shape, "rows": [asdict(row) for row in rows]})


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
    rollout = dict(engine="sglang", prompts_per_rollout=len(lengths), samples_per_prompt=1)
    tables = {
        "model": {"load": model, "dtype": DTYPE, "layer_spec": layer_spec},
        "parallel": {"max_tokens_per_microbatch": sum(lengths)},
        "data": {"max_prompt_tokens": 1},
        "rollout": rollout | dict(max_response_tokens=lengths[0] - 1, num_topk_log_probs=top_k),
        "algorithm": {"minibatches_per_rollout": 1},
    }
    config = Config.model_validate(tables)
    job = Job.of(config, model_facts(config, 1), Machine(num_gpus=1, gpu_bytes=10**12))
    moments = memory_of(job, job.layout).worst.moments
    return max(
        sum(size for name, size in moments[moment].items() if name != "reserve")
        for moment in ("loss", "backward", "step")
    )


def show(rows: Sequence[Measured], device: str, peak: float | None, layers: int, sequence_length: int) -> None:
    """Print the table, and the peak that it assumes."""
    assumed = f"{peak:,.1f} TFLOP/s, dense bfloat16" if peak else "not known; give --peak-tflops for MFU"
    typer.echo(f"\n{device}; its peak: {assumed}")
    cells: list[list[str]] = []
    for row in rows:
        speed = ["does not fit", "-", "-"]
        if row.seconds:
            milliseconds = f"{statistics.median(row.seconds) * 1e3:,.1f}"
            speed = [milliseconds, f"{row.tokens_per_s:,.0f}", f"{row.mfu(peak * 1e12):.1%}" if peak else "-"]
        memory = (f"{size / 2**30:.1f}" for size in (row.peak_bytes, row.planned_bytes))
        cells.append([row.layer_spec, row.objective, f"{row.num_tokens:,}", *speed, *memory])
    title = f"training step, {layers} of Qwen3-30B-A3B's 48 layers, sequences of {sequence_length} tokens"
    names = ("layer spec", "objective", "tokens", "ms", "tokens/s", "MFU", "peak GiB", "planned")
    show_table(title, names, cells)
    pairs = zip(rows, cells, strict=True)
    done = [(row.tokens_per_s, row.peak_bytes, cell) for row, cell in pairs if row.seconds]
    if done:
        spec, objective, tokens, milliseconds, speed, mfu, *_ = max(done)[2]
        most = max(peak_bytes for _, peak_bytes, _ in done) / 2**30
        best = f"{tokens} tokens in {milliseconds} ms, {speed} tokens/s, MFU {mfu} ({spec}, {objective})"
        typer.echo(f"\nbest: {best}; at most {most:.1f} GiB in any step")


if __name__ == "__main__":
    cli(main, __doc__)
