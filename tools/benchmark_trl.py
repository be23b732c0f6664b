"""Our loop and TRL's GRPOTrainer, interleaved, on one model, task and precision.

    make bench-trl                                      # sets up TRL's own environment first
    python tools/benchmark_trl.py --trl-python PATH --repeats 1 --rollouts 30

Both train the quickstart's model in float32 with float32 rollouts: 64 prompts x 8 samples and 4 gradient steps
per rollout, AdamW at 4e-4 after 20 steps of warm-up, clip 1, token-mean loss, advantages without standard
deviation. Each uses the whole machine in its own way: ours 2 processes of one thread (expert parallel), TRL one
process of 2 threads.
What is not the same: the objective (DPPO-Binary-TV; GRPO .2/.28), the order of prompts, sampling noise. Set-up
(imports, loading, warm start) is left out on both sides.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from megatron_dppo.diagnostics.run_reader import read_run

sys.path.insert(0, str(Path(__file__).parent))
from benchmark_loop import MODEL, OUT, require_model, train

SAMPLES, TARGET, SKIPPED = 512, 0.75, 3


@dataclass(frozen=True)
class Measured:
    """One run of one of the two."""

    name: str
    seconds: list[float]  # per rollout, wall clock
    rewards: list[float]

    @property
    def samples_per_s(self) -> float:
        """Of the median rollout, the first few left out."""
        return SAMPLES / statistics.median(self.seconds[SKIPPED:])

    @property
    def seconds_to_target(self) -> float | None:
        """From the first rollout's start until three rollouts in a row earn the target on average."""
        for i in range(2, len(self.rewards)):
            if sum(self.rewards[i - 2 : i + 1]) / 3 >= TARGET:
                return sum(self.seconds[: i + 1])
        return None


def main(
    trl_python: Annotated[Path, typer.Option(help="Interpreter of an environment with trl==1.16.0.")],
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is run, in turn.")] = 3,
    rollouts: Annotated[int, typer.Option(min=SKIPPED + 2, help="Rollouts of each run.")] = 45,
) -> None:
    """Run both in turn and print medians, spread and ratios."""
    require_model()
    runs: dict[str, list[Measured]] = {"ours": [], "TRL": []}
    for repeat in range(repeats):
        for name, run in (("ours", run_ours), ("TRL", lambda *a: run_trl(trl_python, *a))):
            measured = run(rollouts, repeat)
            runs[name].append(measured)
            typer.echo(
                f"{name:5} run {repeat + 1}/{repeats}: {measured.samples_per_s:6.0f} samples/s, reward "
                f"{TARGET} after {_seconds(measured.seconds_to_target)}, last {measured.rewards[-1]:.2f}"
            )
    report(runs)


def run_ours(rollouts: int, seed: int) -> Measured:
    """`megatron-dppo train` on two processes; wall clock from the start of the first rollout."""
    folder = OUT / "trl_ours"
    train(
        folder,
        2,
        [
            *("parallel.expert=2", f"run.num_rollouts={rollouts}", f"run.seed={seed}"),
            *("rollout.transformers.weights='float32'", "rollout.routing_replay='off'"),
            *("tracking.paired_routing_every=0", "tracking.samples_every=0", "checkpoint.every=0"),
        ],
    )
    rows = read_run(folder).rollouts
    seconds = [row.values["time/total_s"] for row in rows]
    return Measured("ours", seconds, [row.values["reward/mean"] for row in rows])


def run_trl(python: Path, rollouts: int, seed: int) -> Measured:
    """tools/trl_baseline.py in TRL's environment."""
    script = Path(__file__).with_name("trl_baseline.py")
    command = [python, script, "--model", MODEL, "--rollouts", str(rollouts), "--seed", str(seed)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    lines = [line.removeprefix("ROLLOUT ") for line in done.stdout.splitlines() if line.startswith("ROLLOUT ")]
    rows = [json.loads(line) for line in lines]
    ends = [0.0] + [row["elapsed_s"] for row in rows]
    return Measured("TRL", [b - a for a, b in pairwise(ends)], [r["reward"] for r in rows])


def report(runs: dict[str, list[Measured]]) -> None:
    """Medians over the repeats, and the ratios."""
    rates = {name: [m.samples_per_s for m in measured] for name, measured in runs.items()}
    times = {name: [m.seconds_to_target for m in measured] for name, measured in runs.items()}
    for name in runs:
        spread = f"{min(rates[name]):.0f}..{max(rates[name]):.0f}"
        typer.echo(f"{name:5} {statistics.median(rates[name]):6.0f} samples/s ({spread})")
    ratio = statistics.median(rates["ours"]) / statistics.median(rates["TRL"])
    typer.echo(f"samples/s, ours / TRL: {ratio:.2f}")
    reached = {name: _known(values) for name, values in times.items()}
    if all(reached.values()):
        to_target = {name: statistics.median(values) for name, values in reached.items()}
        typer.echo(f"seconds to reward {TARGET}, TRL / ours: {to_target['TRL'] / to_target['ours']:.2f}")
    else:
        typer.echo(f"reward {TARGET} was not reached by each: {times}")
    content = {name: [asdict(m) for m in measured] for name, measured in runs.items()}
    (OUT / "trl.json").write_text(json.dumps({"ratio_samples_per_s": ratio, "runs": content}, indent=1) + "\n")
    typer.echo(f"wrote {OUT / 'trl.json'}")


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    typer.run(main)
