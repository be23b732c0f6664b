"""Compares our loop with TRL's GRPOTrainer: the same model, prompts, reward, precision, batch and optimizer.

    make bench-trl                                                  # sets up TRL's own environment first
    python -m tools.benchmarks.trl_comparison --trl-python .venv-trl/bin/python --repeats 1 --rollouts 30

Both sides train the quickstart's model and roll out in float32 on two cores. Our side uses 2 processes of one
thread, data-parallel (DP2) or with the experts split between them (EP2, as in the quickstart). TRL uses 1
process of 2 threads (its default) or 2 data-parallel processes of one thread, whichever is faster in a short
trial. TRL's settings are derived from our config. Runs alternate. Seconds are wall clock, from rollout to
rollout. Reward .75 is reached when the mean reward of three consecutive rollouts is .75. README.md lists the
differences between the sides. Results are written to runs/bench/trl.json. The tool warns of a busy machine.
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

from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.reader import read_run
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import OUT, ROOT, cli, spread, torchrun, warn_if_busy, write_json
from tools.benchmarks.loop import MODEL, QUICKSTART, Watched, require_model, train, watch

TARGET, SKIPPED, TRIAL_ROLLOUTS, CORES = 0.75, 3, 8, 2
TRL = "TRL"
OURS: Mapping[str, int] = {"ours, DP2": 1, "ours, EP2": CORES}  # parallel.expert
TRL_LINE = re.compile(r"^ROLLOUT ")
SAME_AS_TRL = (
    *("rollout.transformers.weights='float32'", "rollout.routing_replay='off'", "data.shuffle=false"),
    *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
)
Figures = dict[str, Any]  # of one run: the entries that `figures_of` returns


def main(
    trl_python: Annotated[Path, typer.Option(help="Python with trl==1.16.0.")] = Path(".venv-trl/bin/python"),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, with seeds 0, 1, ...")] = 3,
    rollouts: Annotated[int, typer.Option(min=5, help=f"Rollouts per run, {SKIPPED} of them to warm up.")] = 45,
    trl_processes: Annotated[int, typer.Option(max=CORES, help="Processes of TRL; 0 tries 1 and 2.")] = 0,
) -> None:
    """Run both sides in turn. Print medians, ranges and ratios."""
    os.chdir(ROOT)
    if not trl_python.is_file():
        expected = "expected a Python with trl==1.16.0. Run `make bench-trl`."
        typer.echo(f"--trl-python: found no {trl_python}; {expected}", err=True)
        raise typer.Exit(2)
    require_model()
    trial: dict[int, float] = {}
    for size in (1, CORES) if not trl_processes else ():
        title = f"trial: TRL on {size} x {CORES // size} threads"
        trial[size] = run_trl(trl_python, size, TRIAL_ROLLOUTS, 0, title)["rollout_s"]
        typer.echo(f"{title}: {trial[size]:.2f} s per rollout")
    num_processes = trl_processes or min(trial, key=lambda size: trial[size])
    runs: dict[str, list[Figures]] = {name: [] for name in (*OURS, TRL)}
    for seed in range(repeats):
        for name, expert in OURS.items():
            runs[name].append(run_ours(expert, rollouts, seed, f"{name} {seed + 1}/{repeats}"))
        runs[TRL].append(run_trl(trl_python, num_processes, rollouts, seed, f"TRL {seed + 1}/{repeats}"))
    show(runs, rollouts, num_processes)
    layout = {"processes": num_processes, "threads": CORES // num_processes, "trial_rollout_s": trial}
    content: dict[str, Any] = {"target": TARGET, "trl_layout": layout}
    content["ratios"] = {name: ratios(runs[name], runs[TRL]) for name in OURS}
    write_json(OUT / "trl.json", content | runs)


def run_ours(expert: int, rollouts: int, seed: int, title: str) -> Figures:
    """Run `megatron-dppo train` on two processes with `expert` expert-parallel ranks."""
    overrides = [f"parallel.expert={expert}", f"run.num_rollouts={rollouts}", f"run.seed={seed}"]
    watched = train(OUT / "trl_ours", CORES, [*overrides, *SAME_AS_TRL], rollouts, title)
    rows = [row.values for row in read_run(OUT / "trl_ours").rollouts]
    ends = [moment for moment, _ in watched.lines]
    moments = [ends[0] - rows[0]["time/total_s"], *ends]
    return figures_of(seed, watched, moments, [row["reward/mean"] for row in rows])


def run_trl(python: Path, num_processes: int, rollouts: int, seed: int, title: str) -> Figures:
    """Run trl_baseline.py in TRL's environment with the settings of our run."""
    threads, settings = CORES // num_processes, OUT / "trl_settings.json"
    content = grpo_settings(num_processes, rollouts, seed)
    settings.write_text(json.dumps(content, indent=1) + "\n")
    launcher = [str(python)] if num_processes == 1 else torchrun(str(python), num_processes)
    command = [*launcher, "-m", "tools.benchmarks.trl_baseline"]
    command += ["--model", str(MODEL), "--settings", str(settings), "--threads", str(threads)]
    watched = watch(command, OUT / "trl_baseline.log", threads, TRL_LINE, rollouts, title)
    assert watched.set_up is not None, "the line comes before the first rollout's"
    moments = [watched.set_up, *(moment for moment, _ in watched.lines)]
    rewards = [json.loads(line.removeprefix("ROLLOUT "))["reward"] for _, line in watched.lines]
    return figures_of(seed, watched, moments, rewards)


def shared_config() -> tuple[Config, int]:
    """Load the config that both sides use. Return it and its samples per rollout."""
    config = load_config([QUICKSTART / "base.toml"], SAME_AS_TRL)
    return config, config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt


def figures_of(seed: int, watched: Watched, moments: Sequence[float], rewards: Sequence[float]) -> Figures:
    """Return the figures of a run from the moments when its first rollout starts and each rollout ends."""
    seconds = [after - before for before, after in pairwise(moments)]
    rollout_s = statistics.median(seconds[SKIPPED:])
    reached = (i for i in range(3, len(rewards) + 1) if sum(rewards[i - 3 : i]) / 3 >= TARGET)
    num_rollouts = next(reached, None)
    return {
        "seed": seed,
        "setup_s": moments[0] - watched.started,  # imports, loading
        "seconds": seconds,
        "rewards": list(rewards),
        "rollout_s": rollout_s,
        "samples_per_s": shared_config()[1] / rollout_s,
        "seconds_to_target": num_rollouts and sum(seconds[:num_rollouts]),
        "other_cores": watched.other_cores,
    }


def grpo_settings(num_processes: int, rollouts: int, seed: int) -> dict[str, Any]:
    """Translate our config into arguments of GRPOConfig. Other arguments keep TRL's defaults."""
    config, num_samples = shared_config()
    steps, optimizer = config.algorithm.minibatches_per_rollout, config.optimizer
    derived = dict(
        per_device_train_batch_size=num_samples // steps // num_processes,
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
    technical = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, gradient_accumulation_steps=1)
    technical |= dict(ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=10**6)
    technical |= dict(report_to="none", save_strategy="no", disable_tqdm=True, seed=seed)
    return derived | objective | technical


def ratios(ours: Sequence[Figures], trl: Sequence[Figures]) -> dict[str, list[float]]:
    """Return the ratios ours / TRL for each seed. Pairs with a missed target have no time ratio."""
    return {
        name: [a[name] / b[name] for a, b in zip(ours, trl, strict=True) if a[name] and b[name]]
        for name in ("samples_per_s", "seconds_to_target")
    }


def show(runs: Mapping[str, Sequence[Figures]], rollouts: int, trl_processes: int) -> None:
    """Print medians and ranges, the ratios, and their limits."""
    digits = {"samples_per_s": 0, "rollout_s": 2, "seconds_to_target": 1, "setup_s": 1}
    rows = [
        [name, *(spread([run[key] for run in side if run[key]], num) for key, num in digits.items())]
        for name, side in runs.items()
    ]
    counts = f"{len(runs[TRL])} runs of each, {rollouts} rollouts; TRL on {trl_processes} processes"
    header = ("", "samples/s", "s per rollout", f"s to reward {TARGET}", "set-up s")
    show_table(f"{counts}. Median (range)", header, rows)
    rows = [[name, *(spread(each, 2) for each in ratios(runs[name], runs[TRL]).values())] for name in OURS]
    title = "ours / TRL for each seed; ours is faster above 1 in samples/s, and below 1 in seconds"
    show_table(title, ("", "samples/s", f"seconds to {TARGET}"), rows)
    for name, side in runs.items():
        missed = [max(run["rewards"]) for run in side if run["seconds_to_target"] is None]
        if missed:
            found = f"{len(missed)} of {len(side)} runs did not reach {TARGET} within {rollouts} rollouts"
            typer.echo(f"{name}: {found} (best rollout {max(missed):.2f}). Raise --rollouts.")
        for number, run in enumerate(side, 1):
            warn_if_busy(f"{name} {number}/{len(side)}", run["other_cores"])


if __name__ == "__main__":
    cli(main, __doc__)
