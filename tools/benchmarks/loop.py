"""Measures the speed of the loop and the time of its phases: `megatron-dppo train` on the quickstart's model.

    make bench
    python -m tools.benchmarks.loop --rollouts 20

Four variants run one after another: 1 process, and 2 processes with the experts split between them, each
without and with routing replay (R3). Every process has one thread. Speeds and shares are medians over rollouts
from the run's metrics.jsonl, without the first two rollouts. Tokens are response tokens. "other" is the wall
clock time of a rollout outside all phases. The floor is the time of the rollout's matrix products at the speed
of a single product of the model's sizes. That speed is measured before each variant on one thread, and
multiplied by the number of processes that have their own core. Figures and run folders go to runs/bench/. Other
busy programs distort the figures; the tool warns of them.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.run_folder.reader import Run, read_run
from tools.benchmarks.benchmarking import (
    OUT,
    ROOT,
    OtherPrograms,
    cli,
    machine,
    torchrun,
    warn_if_busy,
    write_json,
)

MODEL = Path("runs/quickstart/model")
QUICKSTART = Path("examples/quickstart")
PHASES = ("rollout", "batch", "train", "sync")
SKIPPED = 2
ROLLOUT_DONE = re.compile(r"\brollout +\d+/\d+ ")


@dataclass(frozen=True)
class Variant:
    """One way to run the loop."""

    title: str
    folder: str
    num_processes: int
    routing_replay: str


VARIANTS = (
    Variant("1 process", "1_process", 1, "off"),
    Variant("1 process, R3", "1_process_replay", 1, "replay"),
    Variant("expert 2", "expert_2", 2, "off"),
    Variant("expert 2, R3", "expert_2_replay", 2, "replay"),
)


@dataclass(frozen=True)
class Watched:
    """Observations of a program while it ran. Times are from this process's clock."""

    started: float
    set_up: float | None  # time of its line START; None without one
    lines: list[tuple[float, str]]  # times and texts of the lines that match the pattern
    other_cores: float | None  # cores used by other programs meanwhile; None if unknown


@dataclass(frozen=True)
class Speed:
    """Medians of a variant."""

    rollout_tokens_per_s: float
    train_tokens_per_s: float
    tokens_per_s: float
    samples_per_s: float
    total_s: float
    phase_s: dict[str, float]
    phase_share: dict[str, float]
    num_rollouts: int
    other_cores: float | None
    floor_s: float  # seconds of the matrix products of a rollout


def main(
    rollouts: Annotated[
        int, typer.Option(min=SKIPPED + 1, help=f"Rollouts per variant, including {SKIPPED} to warm up.")
    ] = 12,
) -> None:
    """Measure tokens/s of rollout and training, and the share of each phase."""
    os.chdir(ROOT)
    require_model()
    num_devices = torch.accelerator.device_count()  # 0 on a CPU: processes then share the cores
    speeds: dict[str, Speed] = {}
    versions: Mapping[str, Any] = {}
    for variant in VARIANTS:
        if 0 < num_devices < variant.num_processes:
            typer.echo(
                f"{variant.title}: left out, it needs {variant.num_processes} devices and found {num_devices}"
            )
            continue
        overrides = [
            *(f"parallel.expert={variant.num_processes}", f"run.num_rollouts={rollouts}"),
            *(f"rollout.routing_replay='{variant.routing_replay}'", "tracking.paired_routing_every=0"),
            *("tracking.samples_every=0", "checkpoint.every=0", "optimizer.warmup_steps=4"),
        ]
        folder, flops_per_s = OUT / variant.folder, product_speed(variant.num_processes)
        watched = train(folder, variant.num_processes, overrides, rollouts, variant.title)
        run = read_run(folder)
        speeds[variant.title], versions = measure(run, watched.other_cores, flops_per_s), run.versions
    show(speeds)
    results = {title: asdict(speed) for title, speed in speeds.items()}
    write_json(OUT / "loop.json", {"machine": machine(), "versions": versions, "variants": results})


def require_model() -> None:
    """Make the quickstart's model if it is missing or outdated."""
    OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", "--out", MODEL], check=True)


def train(
    folder: Path, num_processes: int, overrides: list[str], num_rollouts: int, title: str, model: Path = MODEL
) -> Watched:
    """Run `megatron-dppo train` under torchrun in a new folder, and record the line at each rollout's end."""
    shutil.rmtree(folder, ignore_errors=True)
    sets = [f"run.folder={str(folder)!r}", f"model.load={str(model)!r}"]
    sets += [f"data.prompts={str(model / 'prompts.jsonl')!r}", *overrides]
    command = [*torchrun(sys.executable, num_processes), "-m", "megatron_dppo", "train"]
    command += [str(QUICKSTART / "base.toml"), *(part for item in sets for part in ("--set", item))]
    return watch(command, folder.with_suffix(".log"), 1, ROLLOUT_DONE, num_rollouts, title)


def watch(
    command: list[str], log: Path, num_threads: int, pattern: re.Pattern[str], num_rollouts: int, title: str
) -> Watched:
    """Run a program to its end with its output in `log`, and advance a bar at each line that matches."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    lines: list[tuple[float, str]] = []
    set_up = None
    started, others = time.perf_counter(), OtherPrograms()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        with log.open("w") as file, tqdm(total=num_rollouts, desc=title, unit="rollout") as bar:
            for line in process.stdout:
                now = time.perf_counter()
                file.write(line)
                set_up = now if line == "START\n" else set_up
                if pattern.search(line):
                    lines.append((now, line))
                    bar.update()
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code or len(lines) != num_rollouts:
        end = log.read_text()[-3000:]
        found = f"exit status {code} and {len(lines)} of {num_rollouts} rollouts"
        typer.echo(f"{title}: found {found}. The end of {log}:\n{end}", err=True)
        raise typer.Exit(1)
    return Watched(started, set_up, lines, others.cores())


def product_speed(num_processes: int) -> float:
    """Measure the FLOP/s of float32 products of an expert layer, times the processes that have a core."""
    hf = json.loads((MODEL / "config.json").read_text())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokens = torch.randn(2048, hf["hidden_size"])
    weight = torch.randn(hf["hidden_size"], 2 * hf["moe_intermediate_size"])
    seconds: list[float] = []
    for _ in range(200):
        started = time.perf_counter()
        torch.mm(tokens, weight)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(num_threads)
    flops = 2 * tokens.numel() * weight.shape[1]
    return flops / min(seconds) * min(num_processes, os.cpu_count() or 1)


def rollout_flops(cost: SampleCost, num_samples: int, row: Mapping[str, float]) -> float:
    """Return the FLOPs of a rollout's matrix products. Sampling is a forward pass without cached prompts.

    Args:
        cost: Cost of forward and backward.
        num_samples: Number of samples, all of about the same length.
        row: Metrics of the rollout.
    """
    prompt_length = row["engine/prompt_tokens"] / num_samples
    training = num_samples * cost.of(round(prompt_length + row["rollout/response_length_mean"]))
    return training + (training - cost.linear * row["engine/cached_tokens"]) / 3


def measure(run: Run, other_cores: float | None, flops_per_s: float) -> Speed:
    """Return medians over a run's rollouts without the first ones, and the floor at this speed of products."""
    rows = [row.values for row in run.rollouts[SKIPPED:]]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    tokens, total_s = median("rollout/num_response_tokens"), median("time/total_s")
    phase_s = {phase: median(f"time/{phase}_s") for phase in PHASES}
    phase_s["other"] = total_s - sum(phase_s.values())
    num_samples = run.option("rollout.prompts_per_rollout") * run.option("rollout.samples_per_prompt")
    cost = SampleCost.of_model(model_shape(json.loads((MODEL / "config.json").read_text())))
    return Speed(
        rollout_tokens_per_s=tokens / phase_s["rollout"],
        train_tokens_per_s=tokens / phase_s["train"],
        tokens_per_s=median("throughput/tokens_per_s"),
        samples_per_s=num_samples / total_s,
        total_s=total_s,
        phase_s=phase_s,
        phase_share={phase: seconds / total_s for phase, seconds in phase_s.items()},
        num_rollouts=len(rows),
        other_cores=other_cores,
        floor_s=statistics.median(rollout_flops(cost, num_samples, row) for row in rows) / flops_per_s,
    )


def show(speeds: Mapping[str, Speed]) -> None:
    """Print the tables, and a warning if other programs were busy."""
    typer.echo(f"\n{'':15}{'rollout':>10}{'training':>10}{'all':>10}{'all':>11}")
    typer.echo(f"{'':15}{'tokens/s':>10}{'tokens/s':>10}{'tokens/s':>10}{'samples/s':>11}")
    for title, speed in speeds.items():
        typer.echo(
            f"{title:15}{speed.rollout_tokens_per_s:10,.0f}{speed.train_tokens_per_s:10,.0f}"
            f"{speed.tokens_per_s:10,.0f}{speed.samples_per_s:11,.0f}"
        )
    names = (*PHASES, "other")
    columns = "".join(f"{name:>14}" for name in names)
    typer.echo(f"\n{'s per rollout':15}{'floor':>8}{'of total':>9}{'total':>8}{columns}")
    for title, speed in speeds.items():
        cells = (f"{speed.phase_s[name]:8.3f} {speed.phase_share[name]:>5.0%}" for name in names)
        floor = f"{speed.floor_s:8.3f}{speed.floor_s / speed.total_s:>9.0%}"
        typer.echo(f"{title:15}{floor}{speed.total_s:8.3f}" + "".join(cells))
    title, best = max(speeds.items(), key=lambda item: item[1].tokens_per_s)
    phase, share = max(best.phase_share.items(), key=lambda item: item[1])
    typer.echo(
        f"\nfastest: {title}, {best.tokens_per_s:,.0f} tokens/s; the {phase} phase takes {share:.0%} of it"
    )
    for title, speed in speeds.items():
        warn_if_busy(title, speed.other_cores)


if __name__ == "__main__":
    cli(main, __doc__)
