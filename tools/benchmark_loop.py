"""How fast the real loop goes, and where the time goes, on the quickstart's model.

    make bench
    python tools/benchmark_loop.py --rollouts 20

Each variant is `megatron-dppo train` as a user starts it; the figures are read from its metrics.jsonl. The
first rollouts are left out. On a machine that does something else besides, compare ratios, not seconds.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.diagnostics.run_reader import read_run

OUT = Path("runs/bench")
MODEL = Path("runs/quickstart/model")
QUICKSTART = Path("examples/quickstart")
PHASES = ("rollout", "batch", "train", "sync")
VARIANTS = {
    "1 process": (1, ["parallel.expert=1", "rollout.routing_replay='off'"]),
    "1 process, R3": (1, ["parallel.expert=1", "rollout.routing_replay='replay'"]),
    "expert 2": (2, ["parallel.expert=2", "rollout.routing_replay='off'"]),
    "expert 2, R3": (2, ["parallel.expert=2", "rollout.routing_replay='replay'"]),
}
SKIPPED = 2


def main(
    rollouts: Annotated[int, typer.Option(min=SKIPPED + 1, help="Rollouts of each variant.")] = 12,
) -> None:
    """Print tokens/s of rollout and training, and the share of each phase."""
    require_model()
    results: dict[str, dict[str, float]] = {}
    for name, (processes, overrides) in VARIANTS.items():
        folder = OUT / name.replace(", ", "_").replace(" ", "_")
        extra = [f"run.num_rollouts={rollouts}", "tracking.paired_routing_every=0", "checkpoint.every=0"]
        train(folder, processes, [*overrides, *extra])
        results[name] = measure(folder)
        typer.echo(f"measured {name}")
    show(results)
    (OUT / "loop.json").write_text(json.dumps(results, indent=2) + "\n")
    typer.echo(f"wrote {OUT / 'loop.json'}")


def require_model() -> None:
    """Make the quickstart's model where it is not there, or not of today's recipe."""
    OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, QUICKSTART / "make_model.py", "--out", MODEL], check=True)


def train(folder: Path, processes: int, overrides: list[str]) -> None:
    """`megatron-dppo train` under torchrun into a fresh folder, its log beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sets = [
        f"run.folder={str(folder)!r}",
        f"model.load={str(MODEL)!r}",
        f"data.prompts={str(MODEL / 'prompts.jsonl')!r}",
        *overrides,
    ]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-addr=127.0.0.1"]
    command = [sys.executable, *launcher, f"--master-port={port}", "-m", "megatron_dppo", "train"]
    command += [str(QUICKSTART / "base.toml"), *(part for item in sets for part in ("--set", item))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment)
    if done.returncode:
        typer.echo(f"training failed; the end of {log}:\n{log.read_text()[-3000:]}", err=True)
        raise typer.Exit(1)


def measure(folder: Path) -> dict[str, float]:
    """Medians over a run's rollouts."""
    rows = [row.values for row in read_run(folder).rollouts[SKIPPED:]]
    result = {f"{phase}_s": statistics.median(row[f"time/{phase}_s"] for row in rows) for phase in PHASES}
    tokens = statistics.median(row["rollout/num_response_tokens"] for row in rows)
    total = statistics.median(row["time/total_s"] for row in rows)
    result["other_s"] = total - sum(result.values())
    result |= {f"{phase}_share": result[f"{phase}_s"] / total for phase in (*PHASES, "other")}
    return result | {
        "rollout_tokens_per_s": tokens / result["rollout_s"],
        "train_tokens_per_s": tokens / result["train_s"],
        "tokens_per_s": tokens / total,
        "seconds_per_rollout": total,
    }


def show(results: dict[str, dict[str, float]]) -> None:
    """One row per variant; tokens are response tokens."""
    typer.echo(
        f"{'':16}{'rollout tok/s':>14}{'train tok/s':>13}{'all tok/s':>11}{'s/rollout':>11}   share of phases"
    )
    for name, row in results.items():
        shares = "  ".join(f"{phase} {row[f'{phase}_share']:.0%}" for phase in (*PHASES, "other"))
        typer.echo(
            f"{name:16}{row['rollout_tokens_per_s']:14.0f}{row['train_tokens_per_s']:13.0f}"
            f"{row['tokens_per_s']:11.0f}{row['seconds_per_rollout']:11.2f}   {shares}"
        )


if __name__ == "__main__":
    typer.run(main)
