"""The whole loop for real, on a CPU or a GPU: warm start, convert, train without and with R3, convert, report.

    python examples/quickstart/run.py            # about 4 minutes on 2 cores
    python examples/quickstart/run.py --short    # the same steps with few rollouts, to see that they work

Two processes train, or one if there is only one GPU. Output goes to runs/quickstart/. The warm start is kept
from one call to the next. The two runs start again.
"""

import argparse
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.analysis.figures.command import draw_figures
from megatron_dppo.analysis.report.findings import MIN_FORWARDS
from megatron_dppo.analysis.report.report import compare
from megatron_dppo.analysis.report.summary import LAST, summary

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("runs/quickstart")
HERE = Path("examples/quickstart")
RUNS = {"measure": "R3 off (measured)", "replay": "R3 on (replayed)"}
log = logging.getLogger("quickstart")


def main() -> None:
    """Run every step, in the repository's root, and print what came out."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="4 rollouts after a brief warm start")
    parser.add_argument("--seed", type=int, default=0, help="seed of the two runs (not of the warm start)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as of `train`; repeatable"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    for name in ("megatron", "trained", "figures", *RUNS):
        shutil.rmtree(OUT / name, ignore_errors=True)

    model = OUT / ("model_short" if options.short else "model")
    with step(
        seconds, "warm_start", "1/5  a tiny Qwen3-MoE, taught by a noisy teacher (kept for the next time)"
    ):
        steps = ["--steps", "60"] if options.short else []
        python(HERE / "make_model.py", "--out", model, *steps)
    with step(seconds, "to_megatron", "2/5  Hugging Face -> Megatron"):
        python("-m", "megatron_dppo", "convert", "to-megatron", "--hf", model, "--out", OUT / "megatron")
    num_processes = processes_here(torch.accelerator.device_count())
    overrides = [f"run.seed={options.seed}", f"data.prompts={str(model / 'prompts.jsonl')!r}"]
    overrides.append(f"parallel.expert={num_processes}")
    if options.short:
        overrides += ["run.num_rollouts=4", "optimizer.warmup_steps=4", "tracking.paired_routing_every=1"]
    overrides += options.set
    for name, title in RUNS.items():
        processes = "2 processes" if num_processes == 2 else "1 process"
        with step(seconds, name, f"3/5  DPPO-Binary-TV on {processes}, {title}"):
            train([HERE / "base.toml", HERE / f"{name}.toml"], overrides, num_processes)
    with step(seconds, "to_hf", "4/5  Megatron -> Hugging Face"):
        checkpoints = OUT / "replay" / "checkpoints"
        last = checkpoints / (checkpoints / "latest").read_text().strip()
        python("-m", "megatron_dppo", "convert", "to-hf", "--megatron", last, "--out", OUT / "trained")
    with step(seconds, "report", "5/5  report"):
        compare([OUT / name for name in RUNS], OUT / "report.html")
        draw_figures([OUT / name for name in RUNS], OUT / "figures")
    seconds["total"] = time.perf_counter() - started
    results = {name: summary(OUT / name) for name in RUNS}
    content = {"seed": options.seed, "short": options.short, "seconds": seconds, "runs": results}
    (OUT / "summary.json").write_text(json.dumps(content, indent=2) + "\n")
    show(results, seconds["total"])


@contextmanager
def step(seconds: dict[str, float], name: str, title: str) -> Iterator[None]:
    """Announce a step and keep its time."""
    log.info("\n== %s", title)
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def python(*arguments: Any) -> None:
    """Run a program with this interpreter; stop here if it fails."""
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


def processes_here(num_devices: int) -> int:
    """Return two processes, each with half of the experts, or one for one GPU: NCCL needs a GPU per rank."""
    return 1 if num_devices == 1 else 2


def train(configs: list[Path], overrides: list[str], num_processes: int) -> None:
    """`megatron-dppo train` under torchrun, on processes of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--master-addr=127.0.0.1"]
    sets = [part for override in overrides for part in ("--set", override)]
    environment = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    os.environ.update(environment)
    python(*launcher, f"--master-port={port}", "-m", "megatron_dppo", "train", *configs, *sets)


def shown(key: str, value: float | None) -> str:
    """A cell: shares and changes as percentages."""
    if value is None:
        return "-"
    if key == "paired_kl_k3_change":
        return f"{value:+.0%}".replace("%", " %")
    return f"{value:.1%}".replace("%", " %") if key == "agreement_mean" else f"{value:.4g}"


def closing(results: dict[str, dict[str, Any]]) -> str:
    """One sentence on what these runs found, from their own figures; one seed is no comparison."""
    rewards: list[str] = []
    for name, words in (("measure", "without"), ("replay", "with")):
        first, last = (results[name].get(f"reward_{end}") for end in ("first", "last"))
        if first is not None and last is not None:
            rewards.append(f"from {first:.2f} to {last:.2f} {words} R3")
    sentence = f"Found: the reward went {' and '.join(rewards)}" if rewards else "Found: no reward"
    change, forwards = (results["replay"].get(key) for key in ("paired_kl_k3_change", "num_rollouts"))
    if forwards is not None and forwards < MIN_FORWARDS:
        sentence += "; the rollouts are too few to say what replaying their routes does to the KL"
    elif change is not None:
        moved = "lowered" if change < 0 else "raised"
        percent = f"{abs(change):.0%}".replace("%", " %")
        sentence += f"; replaying the rollout's routes {moved} the KL of engine and trainer on equal samples "
        sentence += f"by {percent}"
    return f"{sentence}. One seed of a tiny model: --seed shows how far that goes."


def show(results: dict[str, dict[str, Any]], total_s: float) -> None:
    """Print the results table without seconds, because one run of each is too few, and the next steps."""
    num_last = min(LAST, int(results["replay"]["num_rollouts"]))
    rows = {
        "reward of rollout 1": "reward_first",
        f"reward, mean of the last {num_last}": "reward_last",
        "mean |pi - mu|": "abs_prob_diff_mean",
        "KL(mu||pi), k3": "kl_k3_mean",
        "paired k3: live routes": "paired_kl_k3_live",
        "paired k3: replayed": "paired_kl_k3_replayed",
        "paired k3: change": "paired_kl_k3_change",
        "largest pi/mu": "ratio_max",
        "smallest pi/mu": "ratio_min",
        "router agreement": "agreement_mean",
    }
    log.info("\n%-30s%22s%22s", "", *RUNS.values())
    for title, key in rows.items():
        values = (results[name].get(key) for name in RUNS)
        log.info("%-30s%22s%22s", title, *(shown(key, value) for value in values))
    log.info("\n%s", closing(results))
    log.info(
        "\ndone in %.0f s. Look at %s and %s in a browser; the numbers are in %s, the trained model in %s.\n"
        "Try next:\n"
        "  python examples/quickstart/run.py --seed 1           how far one seed goes\n"
        "  python examples/quickstart/run.py --set algorithm.preset=grpo_clip_higher\n"
        "  megatron-dppo check examples/quickstart/base.toml examples/quickstart/replay.toml --world-size 2",
        total_s,
        OUT / "report.html",
        OUT / "figures" / "index.html",
        OUT / "summary.json",
        OUT / "trained",
    )


if __name__ == "__main__":
    main()
