"""Compares our loop with TRL's GRPOTrainer: the same model, prompts, reward, precision, batch and optimizer.

    make bench-trl                                                  # sets up TRL's own environment first
    python -m tools.benchmarks.trl_comparison --trl-python .venv-trl/bin/python --repeats 1 --rollouts 30
    python -m tools.benchmarks.trl_comparison --workload mixed      # responses of 17 to 256 tokens, most short

Both sides train the quickstart's model and roll out in float32 on two cores. Our side uses 2 processes of one
thread, data-parallel (DP2) or with the experts split between them (EP2, as in the quickstart). TRL uses 1
process of 2 threads (its default) or 2 data-parallel processes of one thread, whichever is faster in a short
trial. TRL's settings are derived from our config. Runs alternate, so that a slow phase of the machine affects
all of them. This program measures wall clock seconds from rollout to rollout for both sides. Reward .75 is
reached when the mean reward of three consecutive rollouts is .75, and the time to it starts with the first
rollout. Results are written to runs/bench/trl_WORKLOAD.json. Use an idle machine; the tool warns of a busy one.

The workload "mixed" is the quickstart's task with a model that often writes many words before the answer
(mixed_lengths.py). The model is trained on first use, which takes minutes.
"""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.run_folder.reader import read_run
from tools.benchmarks.benchmarking import OUT, ROOT, cli, machine, spread, torchrun, warn_if_busy, write_json
from tools.benchmarks.loop import MODEL, QUICKSTART, require_model, train, watch
from tools.benchmarks.mixed_lengths import LONGEST, make_mixed_model

TARGET, SKIPPED, TRIAL_ROLLOUTS, CORES = 0.75, 3, 8, 2


class Workload(StrEnum):
    """A model and task to train on."""

    QUICKSTART = "quickstart"
    MIXED = "mixed"

    @property
    def model(self) -> Path:
        """Folder of the model."""
        return MODEL if self is Workload.QUICKSTART else OUT / "mixed_model"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the quickstart's config."""
        if self is Workload.QUICKSTART:
            return SAME_AS_TRL
        return (*SAME_AS_TRL, f"rollout.max_response_tokens={LONGEST}")

    def make_model(self) -> None:
        """Make the model if it is missing."""
        require_model()
        if self is Workload.MIXED:
            make_mixed_model(MODEL, self.model)

    def config(self) -> Config:
        """Load the config that both sides use."""
        return load_config([QUICKSTART / "base.toml"], self.overrides)


TRL = "TRL"
OURS: Mapping[str, int] = {"ours, DP2": 1, "ours, EP2": CORES}  # parallel.expert
TRL_LINE = re.compile(r"^ROLLOUT ")
SAME_AS_TRL = (
    *("rollout.transformers.weights='float32'", "rollout.routing_replay='off'", "data.shuffle=false"),
    *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
)
WHAT_IS_COMPARED = """
The same on both sides: checkpoint, prompts and their order, reward, float32 weights for training and sampling,
samples and gradient steps per rollout, AdamW, clip, token-mean loss, advantages without standard deviation, two
cores.
Not the same: the objective (ours DPPO-Binary-TV, TRL's GRPO .2/.28), the random numbers, the split of a rollout
into mini-batches (ours by prompt, TRL's by sample), and the first learning rate (TRL's warm-up starts at 0,
ours one step later). TRL recomputes old log-probs, which GRPO needs; DPPO uses the rollout's log-probs. Each
side computes its own metrics. Seconds to .75 depend on the speed and on how fast the reward rises, which is
noisy with few seeds. The figures do not apply to GPUs, vLLM or SGLang, long responses or large models.
"""


@dataclass(frozen=True)
class Measured:
    """One run of one side."""

    seed: int
    setup_s: float  # seconds before the first rollout: imports, loading
    seconds: list[float]  # per rollout, wall clock
    rewards: list[float]
    samples_per_rollout: int
    other_cores: float | None

    @property
    def rollout_s(self) -> float:
        """Median seconds per rollout, without the first ones."""
        return statistics.median(self.seconds[SKIPPED:])

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the median rollout."""
        return self.samples_per_rollout / self.rollout_s

    @property
    def seconds_to_target(self) -> float | None:
        """Seconds from the first rollout's start until the mean reward of three rollouts reaches the target."""
        for i in range(2, len(self.rewards)):
            if sum(self.rewards[i - 2 : i + 1]) / 3 >= TARGET:
                return sum(self.seconds[: i + 1])
        return None


def main(
    trl_python: Annotated[
        Path, typer.Option(help="Python of an environment with trl==1.16.0; `make bench-trl` makes one.")
    ] = Path(".venv-trl/bin/python"),
    workload: Annotated[Workload, typer.Option(help="Model and task.")] = Workload.QUICKSTART,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each side, with seeds 0, 1, ...")] = 3,
    rollouts: Annotated[
        int, typer.Option(min=5, help=f"Rollouts per run; the speed excludes the first {SKIPPED}.")
    ] = 45,
    trl_processes: Annotated[
        int | None, typer.Option(min=1, max=CORES, help="Processes of TRL, 1 or 2. [default: try both]")
    ] = None,
) -> None:
    """Run both sides in turn. Print medians, ranges and ratios."""
    os.chdir(ROOT)
    if not trl_python.is_file():
        found = (
            f"--trl-python: found no {trl_python}; expected a Python with trl==1.16.0. Run `make bench-trl`."
        )
        typer.echo(found, err=True)
        raise typer.Exit(2)
    workload.make_model()
    trial: dict[int, float] = {}
    if trl_processes is None:
        trial = try_layouts(workload, trl_python)
        trl_processes = min(trial, key=lambda num_processes: trial[num_processes])
    runs: dict[str, list[Measured]] = {name: [] for name in (*OURS, TRL)}
    for seed in range(repeats):
        for name, expert in OURS.items():
            runs[name].append(run_ours(workload, expert, rollouts, seed, f"{name} {seed + 1}/{repeats}"))
        title = f"TRL {seed + 1}/{repeats}"
        runs[TRL].append(run_trl(workload, trl_python, trl_processes, rollouts, seed, title))
    show(runs, rollouts, trl_processes)
    layout = {"processes": trl_processes, "threads": CORES // trl_processes, "trial_rollout_s": trial}
    content = {"machine": machine(), "target": TARGET, "trl_layout": layout}
    content["ratios"] = {name: ratios(runs[name], runs[TRL]) for name in OURS}
    content |= {name: [as_json(run) for run in of_side] for name, of_side in runs.items()}
    write_json(OUT / f"trl_{workload}.json", content)


def try_layouts(workload: Workload, python: Path) -> dict[int, float]:
    """Measure TRL's seconds per rollout on one process with both cores, and on two processes."""
    trial = {}
    for num_processes in (1, CORES):
        threads = CORES // num_processes
        title = f"trial: TRL on {num_processes} x {threads} threads"
        measured = run_trl(workload, python, num_processes, TRIAL_ROLLOUTS, 0, title)
        warn_if_busy(title, measured.other_cores)
        trial[num_processes] = measured.rollout_s
    for num_processes, seconds in trial.items():
        typer.echo(
            f"TRL, {num_processes} process x {CORES // num_processes} threads: {seconds:.2f} s per rollout"
        )
    return trial


def run_ours(workload: Workload, expert: int, rollouts: int, seed: int, title: str) -> Measured:
    """Run `megatron-dppo train` on two processes with `expert` expert-parallel ranks.

    The start of the first rollout is computed from the run's own metrics.
    """
    folder = OUT / "trl_ours"
    overrides = [f"parallel.expert={expert}", f"run.num_rollouts={rollouts}", f"run.seed={seed}"]
    watched = train(folder, CORES, [*overrides, *workload.overrides], rollouts, title, workload.model)
    rows, ends = read_run(folder).rollouts, [moment for moment, _ in watched.lines]
    start = ends[0] - rows[0].values["time/total_s"]
    seconds = [after - before for before, after in pairwise([start, *ends])]
    rewards = [row.values["reward/mean"] for row in rows]
    samples = samples_per_rollout(workload.config())
    return Measured(seed, start - watched.started, seconds, rewards, samples, watched.other_cores)


def run_trl(
    workload: Workload, python: Path, num_processes: int, rollouts: int, seed: int, title: str
) -> Measured:
    """Run trl_baseline.py in TRL's environment with the settings of our run."""
    config, threads = workload.config(), CORES // num_processes
    settings = OUT / "trl_settings.json"
    settings.write_text(json.dumps(grpo_settings(config, num_processes, rollouts, seed), indent=1) + "\n")
    launcher = [str(python)] if num_processes == 1 else torchrun(str(python), num_processes)
    command = [*launcher, "-m", "tools.benchmarks.trl_baseline"]
    command += ["--model", str(workload.model), "--settings", str(settings), "--threads", str(threads)]
    watched = watch(command, OUT / "trl_baseline.log", threads, TRL_LINE, rollouts, title)
    rows = [json.loads(line.removeprefix("ROLLOUT ")) for _, line in watched.lines]
    assert watched.set_up is not None, "the line comes before the first rollout's"
    moments = [watched.set_up, *(moment for moment, _ in watched.lines)]
    seconds = [after - before for before, after in pairwise(moments)]
    rewards = [row["reward"] for row in rows]
    setup_s = watched.set_up - watched.started
    return Measured(seed, setup_s, seconds, rewards, samples_per_rollout(config), watched.other_cores)


def samples_per_rollout(config: Config) -> int:
    """Return the number of samples per rollout."""
    return config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt


def grpo_settings(config: Config, num_processes: int, rollouts: int, seed: int) -> dict[str, Any]:
    """Translate our config into arguments of GRPOConfig. Other arguments keep TRL's defaults."""
    steps, optimizer = config.algorithm.minibatches_per_rollout, config.optimizer
    return {
        "per_device_train_batch_size": samples_per_rollout(config) // steps // num_processes,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": steps,
        "num_generations": config.rollout.samples_per_prompt,
        "max_completion_length": config.rollout.max_response_tokens,
        "max_steps": steps * rollouts,
        "seed": seed,
        "shuffle_dataset": config.data.shuffle,
        "temperature": config.rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": optimizer.warmup_steps,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_grad,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "scale_rewards": "none",  # advantages without standard deviation
        "loss_type": "dapo",  # token mean
        "router_aux_loss_coef": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 10**6,
        "disable_tqdm": True,
    }


def ratios(ours: Sequence[Measured], trl: Sequence[Measured]) -> dict[str, list[float]]:
    """Return the ratios ours / TRL for each seed. Pairs with a missed target have no time ratio."""
    pairs = list(zip(ours, trl, strict=True))
    targets = [(one.seconds_to_target, other.seconds_to_target) for one, other in pairs]
    return {
        "samples_per_s": [one.samples_per_s / other.samples_per_s for one, other in pairs],
        "seconds_to_target": [a / b for a, b in targets if a is not None and b is not None],
    }


def show(runs: Mapping[str, Sequence[Measured]], rollouts: int, trl_processes: int) -> None:
    """Print medians and ranges, the ratios, and their limits."""
    repeats = len(runs[TRL])
    typer.echo(
        f"\n{repeats} runs of each, {rollouts} rollouts; TRL on {trl_processes} processes. Median (range):"
    )
    typer.echo(f"{'':12}{'samples/s':>20}{'s per rollout':>22}{f's to reward {TARGET}':>24}{'set-up s':>20}")
    for name, of_side in runs.items():
        reached = [seconds for run in of_side if (seconds := run.seconds_to_target) is not None]
        typer.echo(
            f"{name:12}{spread([run.samples_per_s for run in of_side], 0):>20}"
            f"{spread([run.rollout_s for run in of_side], 2):>22}{spread(reached, 1):>24}"
            f"{spread([run.setup_s for run in of_side], 1):>20}"
        )
    typer.echo("\nours / TRL for each seed; ours is faster above 1 in samples/s, and below 1 in seconds:")
    typer.echo(f"{'':12}{'samples/s':>20}{f'seconds to {TARGET}':>24}")
    for name in OURS:
        of_pairs = ratios(runs[name], runs[TRL])
        seconds = spread(of_pairs["seconds_to_target"], 2)
        typer.echo(f"{name:12}{spread(of_pairs['samples_per_s'], 2):>20}{seconds:>24}")
    for name, of_side in runs.items():
        missed = [run for run in of_side if run.seconds_to_target is None]
        if missed:
            best = max(max(run.rewards) for run in missed)
            typer.echo(
                f"{name}: {len(missed)} of {repeats} runs did not reach {TARGET} within {rollouts} rollouts "
                f"(best rollout {best:.2f}); their pairs are not in the ratio of seconds. Raise --rollouts."
            )
        for number, run in enumerate(of_side, 1):
            warn_if_busy(f"{name} {number}/{repeats}", run.other_cores)
    typer.echo(WHAT_IS_COMPARED)


def as_json(run: Measured) -> dict[str, Any]:
    """Return a run as JSON, with derived figures."""
    derived = {"samples_per_s": run.samples_per_s, "seconds_to_target": run.seconds_to_target}
    return derived | asdict(run)


if __name__ == "__main__":
    cli(main, __doc__)
