"""Measures the loop's speed and the time of each phase of `megatron-dppo train`, on the quickstart.

    make bench
    python -m tools.benchmarks.loop --rollouts 20

The four variants run one after another: 1 process, and 2 processes with the experts split between them, each
without and with routing replay (R3), one thread per process. Speeds and shares are medians over rollouts
without the first two. Tokens are response tokens. "other" is the time of a rollout outside all phases. Figures
and run folders go to runs/bench/. Other busy programs distort the figures; the tool warns of them.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.run_folder.reader import Run, read_run
from tools.benchmarks import benchmarking as bench

QUICKSTART = Path("examples/quickstart")
CONFIG, MODEL = QUICKSTART / "base.toml", Path("runs/quickstart/model")
PROMPTS = MODEL / "prompts.jsonl"
PHASES = ("rollout", "batch", "train", "sync")
SKIPPED = 2
ROLLOUT_DONE = re.compile(r"\brollout +\d+/\d+ ")


@dataclass(frozen=True)
class Variant:
    """Number of processes, threads of each, and settings."""

    num_processes: int
    num_threads: int
    settings: tuple[str, ...] = ()


_OFF, _REPLAY = "rollout.routing_replay='off'", "rollout.routing_replay='replay'"
VARIANTS = {
    "1 process": Variant(1, 1, (_OFF, "parallel.expert=1")),
    "1 process, R3": Variant(1, 1, (_REPLAY, "parallel.expert=1")),
    "expert 2": Variant(2, 1, (_OFF, "parallel.expert=2")),
    "expert 2, R3": Variant(2, 1, (_REPLAY, "parallel.expert=2")),
}


@dataclass(frozen=True)
class Watched:
    """Moments of a program's run, by this process's clock."""

    started: float
    set_up: float | None  # moment of the line START; None without one
    lines: list[tuple[float, str]]  # moments and texts of the lines that match the pattern
    other_cores: float  # cores used by other programs meanwhile


def main(
    rollouts: Annotated[int, typer.Option(min=3, help="Rollouts per variant, 2 of them to warm up.")] = 12,
) -> None:
    """Measure tokens/s of rollout and training, and the share of each phase."""
    os.chdir(bench.ROOT)
    prepare()
    num_devices = torch.accelerator.device_count()  # 0 on a CPU: processes then share the cores
    speeds: dict[str, dict[str, Any]] = {}
    versions: Mapping[str, Any] = {}
    for title, variant in VARIANTS.items():
        num_processes = variant.num_processes
        if 0 < num_devices < num_processes:
            typer.echo(f"{title}: left out, it needs {num_processes} devices and found {num_devices}")
            continue
        overrides = [
            *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
            *("evaluation.every=0", "optimizer.warmup_steps=4"),
        ]
        folder = bench.OUT / f"quickstart_{title.replace(', R3', '_replay').replace(' ', '_')}"
        watched = train(variant, folder, overrides, rollouts, title)
        run = read_run(folder)
        speeds[title], versions = measure(run, watched.other_cores), run.versions
    show(speeds)
    bench.write_json(bench.OUT / "loop_quickstart.json", {"versions": versions, "variants": speeds})


def prepare() -> None:
    """Make the quickstart's model, if it is missing or outdated."""
    bench.OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", "--out", MODEL], check=True)


def train(variant: Variant, folder: Path, overrides: Sequence[str], num_rollouts: int, title: str) -> Watched:
    """Run `megatron-dppo train` under torchrun in a new folder, and record the line at each rollout's end."""
    shutil.rmtree(folder, ignore_errors=True)
    sets = [f"run.folder={str(folder)!r}", f"model.load={str(MODEL)!r}"]
    sets += [f"data.prompts={str(PROMPTS)!r}", f"run.num_threads={variant.num_threads}"]
    sets += [f"run.num_rollouts={num_rollouts}", *variant.settings, *overrides]
    command = [*bench.torchrun(sys.executable, variant.num_processes), "-m", "megatron_dppo", "train"]
    command += [str(CONFIG), *(part for item in sets for part in ("--set", item))]
    return watch(command, folder.with_suffix(".log"), variant.num_threads, ROLLOUT_DONE, num_rollouts, title)


def watch(
    command: list[str], log: Path, num_threads: int, pattern: re.Pattern[str], num_rollouts: int, title: str
) -> Watched:
    """Run a program to its end with its output in `log`, and advance a bar at each line that matches."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    lines, set_up = list[tuple[float, str]](), None
    started, others = time.perf_counter(), bench.OtherPrograms()
    output: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, env=environment, **output)
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


def measure(run: Run, other_cores: float) -> dict[str, Any]:
    """Return medians over a run's rollouts without the first ones."""
    rows = [row.values for row in run.rollouts[SKIPPED:]]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    tokens, total_s = median("rollout/num_response_tokens"), median("time/total_s")
    phase_s = {phase: median(f"time/{phase}_s") for phase in PHASES}
    phase_s["other"] = total_s - sum(phase_s.values())
    num_samples = run.option("rollout.prompts_per_rollout") * run.option("rollout.samples_per_prompt")
    return {
        "rollout_tokens_per_s": tokens / phase_s["rollout"],
        "train_tokens_per_s": tokens / phase_s["train"],
        "tokens_per_s": median("throughput/tokens_per_s"),
        "samples_per_s": num_samples / total_s,
        "total_s": total_s,
        "phase_s": phase_s,
        "phase_share": {phase: seconds / total_s for phase, seconds in phase_s.items()},
        "num_rollouts": len(rows),
        "other_cores": other_cores,
    }


def show(speeds: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the tables, and a warning if other programs were busy."""
    names = ("rollout_tokens_per_s", "train_tokens_per_s", "tokens_per_s", "samples_per_s")
    rows = [[title, *(f"{speed[name]:,.0f}" for name in names)] for title, speed in speeds.items()]
    show_table("speed", ("", "rollout tokens/s", "training tokens/s", "all tokens/s", "samples/s"), rows)
    rows.clear()
    for title, speed in speeds.items():
        shares = (f"{speed['phase_s'][name]:.3f} {share:>4.0%}" for name, share in speed["phase_share"].items())
        rows.append([title, f"{speed['total_s']:.3f}", *shares])
    show_table("seconds of a rollout", ("", "total", *PHASES, "other"), rows)
    title, best = max(speeds.items(), key=lambda item: item[1]["tokens_per_s"])
    phase, share = max(best["phase_share"].items(), key=lambda item: item[1])
    fastest = f"{title}, {best['tokens_per_s']:,.0f} tokens/s; the {phase} phase takes {share:.0%} of it"
    typer.echo(f"\nfastest: {fastest}")
    for title, speed in speeds.items():
        bench.warn_if_busy(title, speed["other_cores"])


if __name__ == "__main__":
    bench.cli(main, __doc__)
