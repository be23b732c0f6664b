"""Measures a training step with layers of Qwen3-30B-A3B on one GPU: tokens/s, share of the GPU's peak, memory.

    make gpu
    python -m tools.benchmarks.gpu_step --tokens 16384 --sequence-length 4096
    python -m tools.benchmarks.gpu_step --layers 3

The model has one layer by default (hidden 2048, 32 heads, 4 key-value heads, 128 experts with top-8 routing,
vocabulary 151936) and random bfloat16 weights. It runs with our torch spec and, if it is usable, with
Transformer Engine's spec. The real actor takes the steps: forward, loss, backward and update, on packed
sequences in one micro-batch. With so few layers, the output layer and the loss are most of the work, so the
figures do not predict the complete model. --layers shows the cost of further layers.

MFU is the ratio of the floating-point operations of forward and backward to the GPU's peak in the same time.
Operations are counted as in work balancing (SampleCost: 6 per token and multiplied weight, and causal
attention; recomputation and the update do not count). The peak is the data sheet's value for dense bfloat16,
selected by device name. Memory is the peak that PyTorch allocated during the steps, including weights and
optimizer. The next column is the estimate of `megatron-dppo plan`, without its reserve for memory outside
PyTorch.

Figures are also written to runs/bench/gpu_step.json.
"""

import gc
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from megatron_dppo.architectures.megatron_options import LayerSpecName
from megatron_dppo.checks import model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.plan import Machine
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.runtime.process import Runtime, gpu_libraries, quiet_library_warnings, start, stop
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import OUT, ROOT, cli, machine, write_json

if TYPE_CHECKING:
    from megatron_dppo.actor.actor import Actor

# Dense bfloat16 TFLOP/s from data sheets. The first entry with a name contained in the device's name is used.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
}
OBJECTIVES = {"dppo_binary_tv": 0, "dppo_topk_kl": 20}  # preset and its top_k; 0 for no Top-K
DTYPE = "bfloat16"
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
    tokens: Annotated[list[int], typer.Option(min=1, help="Tokens of a step (repeatable).")] = [  # noqa: B006
        8192,
        16384,
        32768,
    ],
    sequence_length: Annotated[int, typer.Option(min=16, help="Tokens of each packed sequence.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help=f"Measured steps, after {WARM_UP} warm-up steps.")] = 5,
    peak_tflops: Annotated[float | None, typer.Option(help="Dense bfloat16 peak. [default: by name]")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder for the temporary random checkpoint.")] = None,
    out: Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")] = OUT
    / "gpu_step.json",
) -> None:
    """Print one table."""
    odd = [count for count in tokens if count % sequence_length]
    if odd:
        typer.echo(
            f"--tokens: found {odd[0]}; expected a multiple of --sequence-length, {sequence_length}", err=True
        )
        raise typer.Exit(2)
    require_gpu()
    quiet_library_warnings()
    from tools.benchmarks.jobs import write_model

    runtime, sizes = start(), QWEN3_30B_A3B | {"num_hidden_layers": layers}
    device = torch.cuda.get_device_name()
    peak = peak_tflops or peak_tflops_of(device)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        write_model(runtime, f"{name}/model", sizes)
        rows = measure_all(runtime, f"{name}/model", sorted(tokens), sequence_length, steps)
    stop()
    show(rows, device, peak, layers, sequence_length)
    shape = {"layers": layers, "sequence_length": sequence_length, "device": device, "peak_tflops": peak}
    write_json(ROOT / out, {"machine": machine(), **shape, "rows": [asdict(row) for row in rows]})


def require_gpu() -> None:
    """Exit with one line if there is no GPU.

    Raises:
        typer.Exit: PyTorch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        typer.echo("this benchmark needs a GPU, and torch found none", err=True)
        raise typer.Exit(2)


def peak_tflops_of(device: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a device, or `None` for an unknown name."""
    return next((peak for name, peak in PEAK_TFLOPS if name in device), None)


def measure_all(
    runtime: Runtime,
    model: str,
    token_counts: Sequence[int],
    sequence_length: int,
    num_steps: int,
    *,
    needs_gpu: bool = True,
) -> list[Measured]:
    """Measure each layer spec and objective for each step size, up to the first size that does not fit.

    Args:
        runtime: Runtime of a job with one process.
        model: Hugging Face folder.
        token_counts: Tokens per step; multiples of `sequence_length`, ascending.
        sequence_length: Tokens of each sequence.
        num_steps: Measured steps of each size.
        needs_gpu: Whether to exit without a GPU.
    """
    if needs_gpu:
        require_gpu()
    from tools.benchmarks.jobs import build_actor

    rows: list[Measured] = []
    specs: list[LayerSpecName] = ["torch"]
    if gpu_libraries().transformer_engine.is_usable:
        specs.append("transformer_engine")
    for spec, (preset, top_k) in itertools.product(specs, OBJECTIVES.items()):
        algorithm = {"preset": preset} | ({"top_k": top_k} if top_k else {})
        rollout = {"num_topk_log_probs": top_k}
        parallel = {"max_tokens_per_microbatch": max(token_counts)}
        actor = build_actor(runtime, model, parallel, DTYPE, spec, algorithm=algorithm, rollout=rollout)
        for num_tokens in token_counts:
            lengths = [sequence_length] * (num_tokens // sequence_length)
            planned = planned_bytes(model, lengths, top_k, spec)
            row = measure(runtime, actor, lengths, top_k, num_steps, planned)
            rows.append(replace(row, layer_spec=spec))
            if not rows[-1].seconds:
                break
        del actor
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def measure(
    runtime: Runtime, actor: "Actor", lengths: Sequence[int], top_k: int, num_steps: int, planned: int
) -> Measured:
    """Measure steps on one packed micro-batch of sequences with these lengths."""
    from tools.benchmarks.jobs import random_samples, step_of, step_seconds

    batch = step_of([random_samples(lengths, actor.hf["vocab_size"], top_k)])
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    try:
        seconds = [step_seconds(runtime, actor, batch) for _ in range(WARM_UP + num_steps)]
    except torch.OutOfMemoryError:
        seconds = []
    return Measured(
        objective=actor.objective.name,
        num_tokens=sum(lengths),
        flops=step_flops(actor.data_parallel.cost, lengths),
        seconds=tuple(seconds[WARM_UP:]),
        peak_bytes=runtime.peak_bytes(),
        planned_bytes=planned,
    )


def planned_bytes(model: str, lengths: Sequence[int], top_k: int, layer_spec: LayerSpecName = "torch") -> int:
    """Return the peak bytes that `plan` predicts for a step on one micro-batch of equally long sequences."""
    tables = {
        "model": {"load": model, "dtype": DTYPE, "layer_spec": layer_spec},
        "parallel": {"max_tokens_per_microbatch": sum(lengths)},
        "data": {"max_prompt_tokens": 1},
        "rollout": {
            "engine": "sglang",
            "prompts_per_rollout": len(lengths),
            "samples_per_prompt": 1,
            "max_response_tokens": lengths[0] - 1,
            "num_topk_log_probs": top_k,
        },
        "algorithm": {"minibatches_per_rollout": 1},
    }
    config = Config.model_validate(tables)
    job = Job.of(config, model_facts(config, 1), Machine(num_gpus=1, gpu_bytes=10**12))
    moments = memory_of(job, job.layout).worst.moments
    return max(
        sum(size for name, size in moments[moment].items() if name != "reserve")
        for moment in ("loss", "backward", "step")
    )


def step_flops(cost: SampleCost, lengths: Sequence[int]) -> float:
    """Return the floating-point operations of forward and backward on sequences of these lengths."""
    return sum(cost.of(length) for length in lengths)


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
    done = [(row, cell) for row, cell in zip(rows, cells, strict=True) if row.seconds]
    if done:
        row, (spec, objective, tokens, milliseconds, speed, mfu, *_) = max(
            done, key=lambda one: one[0].tokens_per_s
        )
        most = max(each.peak_bytes for each, _ in done) / 2**30
        typer.echo(
            f"\nbest: {tokens} tokens in {milliseconds} ms, {speed} tokens/s, MFU {mfu} ({spec}, {objective}); "
            f"at most {most:.1f} GiB in any step"
        )
    typer.echo()


if __name__ == "__main__":
    cli(main, __doc__)
