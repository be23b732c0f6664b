"""Compares our loop with TRL's GRPOTrainer: the same model, prompts, reward, precision, batch and optimizer.

    make bench-trl                                                  # sets up TRL's own environment first
    python -m tools.benchmarks.trl_comparison --trl-python .venv-trl/bin/python --repeats 1 --rollouts 30

Both sides train the quickstart's model and roll out in float32 on two cores. Our side uses 2 processes of one
thread, data-parallel (DP2) or with the experts split between them (EP2, as in the quickstart). TRL uses 2
data-parallel processes of one thread, or 1 process of 2 threads, its default, which was slower. TRL's settings
are derived from our config. Runs alternate. Seconds are wall clock, from rollout to rollout. The target is
reached when the mean reward of three consecutive rollouts is .75. README.md lists the differences between the
sides. Results are written to runs/bench/trl_quickstart.json. The tool warns of a busy machine.
"""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.reader import read_run
from tools.benchmarks.benchmarking import OUT, ROOT, cli, spread, torchrun, warn_if_busy, write_json
from tools.benchmarks.loop import CONFIG, MODEL, PROMPTS, Variant, Watched, prepare, train, watch

CORES, TRL = 2, "TRL"
TRL_LINE = re.compile(r"^ROLLOUT ")
SAME_AS_TRL = (
    *("rollout.transformers.weights='float32'", "rollout.routing_replay='off'", "data.shuffle=false"),
    *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
    "evaluation.every=0",
)
OURS = {
    "ours, DP2": Variant(CORES, 1, ("parallel.expert=1",)),
    "ours, EP2": Variant(CORES, 1, (f"parallel.expert={CORES}",)),
}
WARM_UP = 3  # rollouts of each run
TARGET = 0.75
Figures = dict[str, Any]  # of one run: the entries that `figures_of` returns


def main(
    trl_python: Annotated[Path, typer.Option(help="Python with trl==1.16.0.")] = Path(".venv-trl/bin/python"),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, with seeds 0, 1, ...")] = 3,
    rollouts: Annotated[int, typer.Option(min=4, help="Rollouts per run; the first ones warm up.")] = 45,
    trl_processes: Annotated[int, typer.Option(min=1, max=CORES, help="Processes of TRL.")] = CORES,
) -> None:
    """Run both sides in turn. Print medians, ranges and ratios."""
    os.chdir(ROOT)
    if not trl_python.is_file():
        expected = "expected a Python with trl==1.16.0. Run `make bench-trl`."
        typer.echo(f"--trl-python: found no {trl_python}; {expected}", err=True)
        raise typer.Exit(2)
    prepare()
    runs: dict[str, list[Figures]] = {name: [] for name in (*OURS, TRL)}
    for seed in range(repeats):
        for name in OURS:
            runs[name].append(run_ours(name, rollouts, seed, f"{name} {seed + 1}/{repeats}"))
        runs[TRL].append(run_trl(trl_python, trl_processes, rollouts, seed, f"TRL {seed + 1}/{repeats}"))
    show(runs, rollouts, trl_processes)
    found = {name: ratios(runs[name], runs[TRL]) for name in OURS}
    content = {"target": TARGET, "trl_layout": name_of(trl_processes), "ratios": found}
    write_json(OUT / "trl_quickstart.json", content | runs)


def name_of(num_processes: int) -> str:
    """Describe a layout of TRL."""
    return f"{num_processes} x {CORES // num_processes} threads"


def same_config() -> tuple[Config, int]:
    """Load the config that both sides use, and return it with its samples per rollout."""
    config = load_config([CONFIG], SAME_AS_TRL)
    return config, config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt


def run_ours(name: str, rollouts: int, seed: int, title: str) -> Figures:
    """Run `megatron-dppo train` in one of our layouts."""
    overrides, folder = [f"run.seed={seed}", *SAME_AS_TRL], OUT / "trl_ours"
    watched = train(OURS[name], folder, overrides, rollouts, title)
    rows = [row.values for row in read_run(folder).rollouts]
    ends = [moment for moment, _ in watched.lines]
    moments = [ends[0] - rows[0]["time/total_s"], *ends]
    return figures_of(seed, watched, moments, [row["reward/mean"] for row in rows])


def run_trl(python: Path, num_processes: int, rollouts: int, seed: int, title: str) -> Figures:
    """Run trl_baseline.py in TRL's environment with the settings of our run."""
    threads, settings = CORES // num_processes, OUT / "trl_settings.json"
    settings.write_text(json.dumps(grpo_settings(num_processes, rollouts, seed), indent=1) + "\n")
    launcher = [str(python)] if num_processes == 1 else torchrun(str(python), num_processes)
    command = [*launcher, "-m", "tools.benchmarks.trl_baseline", "--threads", str(threads)]
    command += ["--model", str(MODEL), "--prompts", str(PROMPTS), "--settings", str(settings)]
    watched = watch(command, OUT / "trl_baseline.log", threads, TRL_LINE, rollouts, title)
    assert watched.set_up is not None, "the line comes before the first rollout's"
    moments = [watched.set_up, *(moment for moment, _ in watched.lines)]
    rewards = [json.loads(line.removeprefix("ROLLOUT "))["reward"] for _, line in watched.lines]
    return figures_of(seed, watched, moments, rewards)


def figures_of(seed: int, watched: Watched, moments: Sequence[float], rewards: Sequence[float]) -> Figures:
    """Return the figures of a run from the moments when its first rollout starts and each rollout ends."""
    seconds = [after - before for before, after in pairwise(moments)]
    rollout_s = statistics.median(seconds[WARM_UP:])
    reached = (i for i in range(3, len(rewards) + 1) if sum(rewards[i - 3 : i]) / 3 >= TARGET)
    num_rollouts = next(reached, None)
    return {
        "seed": seed,
        "setup_s": moments[0] - watched.started,  # imports, loading
        "seconds": seconds,
        "rewards": list(rewards),
        "rollout_s": rollout_s,
        "samples_per_s": same_config()[1] / rollout_s,
        "seconds_to_target": num_rollouts and sum(seconds[:num_rollouts]),
        "other_cores": watched.other_cores,
    }


def grpo_settings(num_processes: int, rollouts: int, seed: int) -> dict[str, Any]:
    """Translate our config into arguments of GRPOConfig. Other arguments keep TRL's defaults."""
    config, num_samples = same_config()
    steps, optimizer = config.algorithm.minibatches_per_rollout, config.optimizer
    derived = dict(
        per_device_train_batch_size=num_samples // steps // num_processes,
        gradient_accumulation_steps=1,
        steps_per_generation=steps,
        num_generations=config.rollout.samples_per_prompt,
        max_completion_length=config.rollout.max_response_tokens,
        max_steps=steps * rollouts,
        shuffle_dataset=config.data.shuffle,
        temperature=config.rollout.temperature,
        learning_rate=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad,
    )
    # "none": advantages without standard deviation; "dapo": token mean.
    objective = dict(beta=0.0, epsilon=0.2, epsilon_high=0.28, scale_rewards="none", loss_type="dapo")
    objective |= dict(router_aux_loss_coef=0.0, top_k=0, top_p=1.0, lr_scheduler_type="constant_with_warmup")
    technical = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, ddp_find_unused_parameters=False)
    technical |= dict(dataloader_pin_memory=False, logging_steps=10**6)
    technical |= dict(report_to="none", save_strategy="no", disable_tqdm=True, seed=seed)
    return derived | objective | technical


def ratios(ours: Sequence[Figures], trl: Sequence[Figures]) -> dict[str, list[float]]:
    """Return the ratios ours / TRL for each seed. Pairs with a missed target have no time ratio."""
    return {
        name: [a[name] / b[name] for a, b in zip(ours, trl, strict=True) if a[name] and b[name]]
        for name in ("samples_per_s", "seconds_to_target")
    }


def show(runs: Mapping[str, Sequence[Figures]], rollouts: int, num_processes: int) -> None:
    """Print medians and ranges, the ratios, and their limits."""
    columns = {"samples_per_s": ("samples/s", 1), "rollout_s": ("s per rollout", 2), "setup_s": ("set-up s", 1)}
    columns["seconds_to_target"] = f"s to reward {TARGET}", 1
    found = {
        name: {key: [run[key] for run in side if run[key]] for key in columns} for name, side in runs.items()
    }
    rows = [[name, *(spread(of[key], columns[key][1]) for key in columns)] for name, of in found.items()]
    counts = f"{len(runs[TRL])} runs of each, {rollouts} rollouts; TRL on {name_of(num_processes)}"
    show_table(f"{counts}. Median (range)", ("", *(title for title, _ in columns.values())), rows)
    names = ("samples_per_s", "seconds_to_target")
    pairs = {name: ratios(runs[name], runs[TRL]) for name in OURS}
    title = "ours / TRL for each seed; ours is faster above 1 in samples/s, and below 1 in seconds"
    rows = [[name, *(spread(pairs[name][key], 2) for key in names)] for name in OURS]
    show_table(title, ("", *(columns[key][0] for key in names)), rows)
    for name, side in runs.items():
        for number, run in enumerate(side, 1):
            warn_if_busy(f"{name} {number}/{len(side)}", run["other_cores"])


if __name__ == "__main__":
    cli(main, __doc__)
