"""Measures time and memory of conversion, compared with a plain copy of the files and with mbridge.

    make bench-convert                                              # sets up mbridge's own environment first
    python -m tools.benchmarks.convert --gb 10 --mbridge-python .venv-mbridge/bin/python

Our tool converts a synthetic Qwen3-MoE with random bfloat16 weights from folder to folder. Our tool and mbridge
also load it into a model on one process and save it. Each job runs in its own process, and jobs alternate.
Memory is the process's memory without mapped files (which the system can drop at any time), and the peak with
them. Time includes the sync to disk. All input is in the system's cache. The output is compared with the source
bit for bit. Results are written to runs/bench/convert.json. Use an idle machine; the tool warns of a busy one.
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_dppo.architectures.registry import family_of
from megatron_dppo.checkpoints.convert.inspect import compare
from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource
from megatron_dppo.checkpoints.hf_folder import HFWeights, write_hf_checkpoint
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import (
    OUT,
    ROOT,
    OtherPrograms,
    cli,
    machine,
    warn_if_busy,
    write_json,
)
from tools.benchmarks.convert_jobs import GB, WRITERS

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def main(
    gb: Annotated[float, typer.Option(min=0.1, help="Approximate model size in 1e9 bytes.")] = 3.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each job; medians are printed.")] = 3,
    mbridge_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with our packages and mbridge==0.15.1.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder to write to, on the disk to measure.")] = None,
) -> None:
    """Measure, print and save the figures."""
    ours: list[str] = ["copy", "through files", "through a model"]
    jobs = dict.fromkeys(ours, sys.executable)
    if mbridge_python is not None:
        jobs["mbridge"] = str(mbridge_python)
    others = OtherPrograms()
    with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark_convert.") as made:
        source = Path(made, "model")
        size = write_model(source, gb)
        typer.echo(f"{size / GB:.2f} GB in {len(_shapes(read(source)))} tensors, {WRITERS} writers")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for _ in range(repeats):
            for name, python in jobs.items():
                found[name].append(run(name, python, source, Path(made, "out")))
    header = ["job", "part", "seconds", "GB", "GB with mapped files", "exact"]
    show_table("conversion, medians", header, list(rows(found)))
    warn_if_busy("conversion", others.cores())
    write_json(OUT / "convert.json", {"machine": machine(), "bytes": size, "writers": WRITERS, "runs": found})


def rows(found: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield job, part, and medians of seconds and memory. The peak with mapped files is of the complete job."""
    for name, runs in found.items():
        resident = statistics.median(run["resident_gb"] for run in runs)
        is_equal = all(run["is_equal"] for run in runs)
        for part in runs[0]["parts"]:
            of = [run["parts"][part] for run in runs]
            seconds, own = (statistics.median(x[key] for x in of) for key in ("seconds", "anonymous_gb"))
            yield [name, part, f"{seconds:.1f}", f"{own:.2f}", f"{resident:.2f}", "yes" if is_equal else "NO"]


def read(source: Path) -> dict[str, Any]:
    """Read config.json of a model."""
    return json.loads((source / "config.json").read_text())


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return family_of(config).hf_shapes(config)


def write_model(out: Path, gb: float) -> int:
    """Write a random model of about this size. Return its size in bytes."""
    sizes = [sum(map(math.prod, _shapes(CONFIG | {"num_hidden_layers": n}).values())) * 2 for n in (1, 2)]
    num_layers = max(1, round((gb * GB - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    config = CONFIG | {"num_hidden_layers": num_layers}
    template = out.with_name("template")
    template.mkdir()
    (template / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = _shapes(config)
    weights = (
        (name, torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator))
        for name, shape in shapes.items()
    )
    write_hf_checkpoint(weights, out, template, GB // 2)
    return sum(map(math.prod, shapes.values())) * 2


def run(job: str, python: str, source: Path, out: Path) -> dict[str, Any]:
    """Run a job in its own process, compare its output with the source, and remove the output."""
    command = [python, "-W", "ignore", "-m", "tools.benchmarks.convert_jobs", job, str(source), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        raise typer.BadParameter(f"{job} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    written = out if job == "copy" else out / "hf"
    result = compare(HuggingFaceSource(HFWeights(source)), HuggingFaceSource(HFWeights(written)))
    shutil.rmtree(out)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {"is_equal": result.is_equal}


if __name__ == "__main__":
    cli(main, __doc__)
