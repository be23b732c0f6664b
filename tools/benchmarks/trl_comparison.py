"""Compares our loop with TRL's GRPOTrainer: the same model, prompts, reward, precision, batch and optimizer.

    make bench-trl                                                  # sets up TRL's own environment first
    python -m tools.benchmarks.trl_comparison --trl-python .venv-trl/bin/python --repeats 1 --rollouts 30
    python -m tools.benchmarks.trl_comparison --workload smollm2 --rollouts 4     # after make smollm2 SHORT=1

Both sides train a model and roll out in float32 on two cores: the quickstart's, or SmolLM2-135M on word
problems. Our side uses 2 processes of one thread, data-parallel (DP2) or with the experts split between them
(EP2, as in the quickstart), or for SmolLM2 one process of 2 threads. TRL uses 1 process of 2 threads (its
default) or 2 data-parallel processes of one thread, and for SmolLM2 each mini-batch whole or in four parts,
whatever is fastest in a short trial. TRL's settings are derived from our config. Runs alternate. Seconds are
wall clock, from rollout to rollout. The quickstart's target is reached when the mean reward of three
consecutive rollouts is .75. README.md lists the differences between the sides. Results are written to
runs/bench/trl_WORKLOAD.json. The tool warns of a busy machine.
"""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.reader import read_run
from tools.benchmarks.benchmarking import OUT, ROOT, cli, spread, torchrun, warn_if_busy, write_json
from tools.benchmarks.loop import QUICKSTART_TASK, SMOLLM2_TASK, Task, Variant, Watched, train, watch

CORES, TRL = 2, "TRL"
TRL_LINE = re.compile(r"^ROLLOUT ")
SAME_AS_TRL = (
    *("rollout.transformers.weights='float32'", "rollout.routing_replay='off'", "data.shuffle=false"),
    *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
    "evaluation.every=0",
)
Figures = dict[str, Any]  # of one run: the entries that `figures_of` returns
Layout = tuple[int, int]  # of TRL: processes, gradient accumulation


@dataclass(frozen=True)
class Workload:
    """What both sides train.

    Attributes:
        task: Our config, and the model and prompts of both sides.
        ours: Our layouts by name.
        layouts: TRL's layouts that the trial compares.
        skipped: Rollouts of each run that warm up.
        trial_rollouts: Rollouts of each run of the trial.
        target: Reward to reach, or None.
        settings: Settings of both sides besides the config and `SAME_AS_TRL`.
    """

    task: Task
    ours: Mapping[str, Variant]
    layouts: Sequence[Layout]
    skipped: int
    trial_rollouts: int
    target: float | None
    settings: tuple[str, ...] = SAME_AS_TRL

    def config(self) -> Config:
        """Load the config that both sides use."""
        return load_config([self.task.config], self.settings)

    @property
    def num_samples(self) -> int:
        """Number of samples per rollout."""
        rollout = self.config().rollout
        return rollout.prompts_per_rollout * rollout.samples_per_prompt


WORKLOADS = {
    "quickstart": Workload(
        QUICKSTART_TASK,
        {
            "ours, DP2": Variant(CORES, 1, ("parallel.expert=1",)),
            "ours, EP2": Variant(CORES, 1, (f"parallel.expert={CORES}",)),
        },
        [(1, 1), (CORES, 1)],
        skipped=3,
        trial_rollouts=8,
        target=0.75,
    ),
    "smollm2": Workload(
        SMOLLM2_TASK,
        {"ours, one process": Variant(1, CORES), "ours, DP2": Variant(CORES, 1)},
        [(1, 1), (CORES, 1), (1, 4), (CORES, 4)],
        skipped=1,
        trial_rollouts=2,
        target=None,
        settings=(*SAME_AS_TRL, "rollout.prompts_per_rollout=8"),  # half of the example's, to save time
    ),
}


def main(
    trl_python: Annotated[Path, typer.Option(help="Python with trl==1.16.0.")] = Path(".venv-trl/bin/python"),
    workload: Annotated[
        Literal["quickstart", "smollm2"], typer.Option(help="What both sides train.")
    ] = "quickstart",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, with seeds 0, 1, ...")] = 3,
    rollouts: Annotated[int, typer.Option(min=4, help="Rollouts per run; the first ones warm up.")] = 45,
    trl_processes: Annotated[int, typer.Option(max=CORES, help="Processes of TRL; 0 tries 1 and 2.")] = 0,
) -> None:
    """Run both sides in turn. Print medians, ranges and ratios."""
    os.chdir(ROOT)
    if not trl_python.is_file():
        expected = "expected a Python with trl==1.16.0. Run `make bench-trl`."
        typer.echo(f"--trl-python: found no {trl_python}; {expected}", err=True)
        raise typer.Exit(2)
    work = WORKLOADS[workload]
    work.task.prepare()
    layouts = [each for each in work.layouts if trl_processes in (0, each[0])]
    trial: dict[Layout, float] = {}
    for layout in layouts if len(layouts) > 1 else ():
        title = f"trial: TRL, {name_of(layout)}"
        trial[layout] = run_trl(work, trl_python, layout, work.trial_rollouts, 0, title)["rollout_s"]
        typer.echo(f"{title}: {trial[layout]:.2f} s per rollout")
    layout = min(trial, key=lambda each: trial[each]) if trial else layouts[0]
    runs: dict[str, list[Figures]] = {name: [] for name in (*work.ours, TRL)}
    for seed in range(repeats):
        for name in work.ours:
            runs[name].append(run_ours(work, name, rollouts, seed, f"{name} {seed + 1}/{repeats}"))
        runs[TRL].append(run_trl(work, trl_python, layout, rollouts, seed, f"TRL {seed + 1}/{repeats}"))
    show(work, runs, rollouts, layout)
    tried = {name_of(each): seconds for each, seconds in trial.items()}
    content: dict[str, Any] = {"target": work.target, "trl_layout": name_of(layout), "trial_rollout_s": tried}
    content["ratios"] = {name: ratios(runs[name], runs[TRL]) for name in work.ours}
    write_json(OUT / f"trl_{workload}.json", content | runs)


def name_of(layout: Layout) -> str:
    """Describe a layout of TRL."""
    processes, parts = layout
    name = f"{processes} x {CORES // processes} threads"
    return name if parts == 1 else f"{name}, mini-batches in {parts} parts"


def run_ours(work: Workload, name: str, rollouts: int, seed: int, title: str) -> Figures:
    """Run `megatron-dppo train` in one of our layouts."""
    overrides, folder = [f"run.seed={seed}", *work.settings], OUT / "trl_ours"
    watched = train(work.task, work.ours[name], folder, overrides, rollouts, title)
    rows = [row.values for row in read_run(folder).rollouts]
    ends = [moment for moment, _ in watched.lines]
    moments = [ends[0] - rows[0]["time/total_s"], *ends]
    return figures_of(work, seed, watched, moments, [row["reward/mean"] for row in rows])


def run_trl(work: Workload, python: Path, layout: Layout, rollouts: int, seed: int, title: str) -> Figures:
    """Run trl_baseline.py in TRL's environment with the settings of our run."""
    num_processes, threads, settings = layout[0], CORES // layout[0], OUT / "trl_settings.json"
    content = grpo_settings(work.config(), layout, rollouts, seed)
    settings.write_text(json.dumps(content, indent=1) + "\n")
    launcher = [str(python)] if num_processes == 1 else torchrun(str(python), num_processes)
    command = [*launcher, "-m", "tools.benchmarks.trl_baseline", "--threads", str(threads)]
    command += ["--model", str(work.task.model), "--prompts", str(work.task.prompts)]
    command += ["--settings", str(settings), "--reward", str(work.config().data.reward).rpartition(":")[2]]
    watched = watch(command, OUT / "trl_baseline.log", threads, TRL_LINE, rollouts, title)
    assert watched.set_up is not None, "the line comes before the first rollout's"
    moments = [watched.set_up, *(moment for moment, _ in watched.lines)]
    rewards = [json.loads(line.removeprefix("ROLLOUT "))["reward"] for _, line in watched.lines]
    return figures_of(work, seed, watched, moments, rewards)


def figures_of(
    work: Workload, seed: int, watched: Watched, moments: Sequence[float], rewards: Sequence[float]
) -> Figures:
    """Return the figures of a run from the moments when its first rollout starts and each rollout ends."""
    seconds = [after - before for before, after in pairwise(moments)]
    rollout_s = statistics.median(seconds[work.skipped :])
    num_rollouts = None
    if work.target is not None:
        reached = (i for i in range(3, len(rewards) + 1) if sum(rewards[i - 3 : i]) / 3 >= work.target)
        num_rollouts = next(reached, None)
    return {
        "seed": seed,
        "setup_s": moments[0] - watched.started,  # imports, loading
        "seconds": seconds,
        "rewards": list(rewards),
        "rollout_s": rollout_s,
        "samples_per_s": work.num_samples / rollout_s,
        "seconds_to_target": num_rollouts and sum(seconds[:num_rollouts]),
        "other_cores": watched.other_cores,
    }


def grpo_settings(config: Config, layout: Layout, rollouts: int, seed: int) -> dict[str, Any]:
    """Translate our config into arguments of GRPOConfig. Other arguments keep TRL's defaults."""
    num_samples = config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt
    steps, optimizer = config.algorithm.minibatches_per_rollout, config.optimizer
    num_processes, parts = layout
    derived = dict(
        per_device_train_batch_size=num_samples // steps // num_processes // parts,
        gradient_accumulation_steps=parts,
        steps_per_generation=steps * parts,
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


def show(work: Workload, runs: Mapping[str, Sequence[Figures]], rollouts: int, layout: Layout) -> None:
    """Print medians and ranges, the ratios, and their limits."""
    columns = {"samples_per_s": ("samples/s", 1), "rollout_s": ("s per rollout", 2), "setup_s": ("set-up s", 1)}
    if work.target is not None:
        columns["seconds_to_target"] = f"s to reward {work.target}", 1
    rows = [
        [
            name,
            *(spread([run[key] for run in side if run[key]], digits) for key, (_, digits) in columns.items()),
        ]
        for name, side in runs.items()
    ]
    counts = f"{len(runs[TRL])} runs of each, {rollouts} rollouts; TRL on {name_of(layout)}"
    show_table(f"{counts}. Median (range)", ("", *(title for title, _ in columns.values())), rows)
    pairs = {name: ratios(runs[name], runs[TRL]) for name in work.ours}
    names = [name for name in ("samples_per_s", "seconds_to_target") if name in columns]
    title = "ours / TRL for each seed; ours is faster above 1 in samples/s, and below 1 in seconds"
    rows = [[name, *(spread(pairs[name][key], 2) for key in names)] for name in work.ours]
    show_table(title, ("", *(columns[key][0] for key in names)), rows)
    for name, side in runs.items():
        missed = [max(run["rewards"]) for run in side if run["seconds_to_target"] is None]
        if missed and work.target is not None:
            found = f"{len(missed)} of {len(side)} runs did not reach {work.target} within {rollouts} rollouts"
            typer.echo(f"{name}: {found} (best rollout {max(missed):.2f}). Raise --rollouts.")
        for number, run in enumerate(side, 1):
            warn_if_busy(f"{name} {number}/{len(side)}", run["other_cores"])


if __name__ == "__main__":
    cli(main, __doc__)
