"""Figures of finished runs, what several seeds say together, and differences on equal seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from study_grid import Cell, Expectation, Grid

from megatron_dppo.analysis.contrasts import Contrast, Estimate, contrast, estimate
from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.reader import Run, read_run

LAST = 10  # rollouts at a run's end that its figures are means of
COLLAPSED_BELOW = 0.5  # of the best such mean earlier in the same run
FIGURES = {
    "reward_last": "reward, last 10",
    "abs_prob_diff_last": "mean |pi-mu|, last 10",
    "kl_k3_mean": "k3, mean",
    "kl_k3_last": "k3, last 10",
    "masked_positive": "masked, A>0",
    "masked_negative": "masked, A<0",
    "agreement": "router agreement",
}


@dataclass(frozen=True)
class RunResult:
    """Metrics of one run; NaN if the run ended before the metric."""

    seed: int
    rewards: tuple[float, ...]  # of each rollout
    figures: Mapping[str, float]
    is_collapsed: bool


@dataclass(frozen=True)
class CellResult:
    """All seeds of a cell that have finished."""

    cell: Cell
    runs: tuple[RunResult, ...]

    def figure(self, name: str) -> Estimate:
        """Mean and interval over seeds."""
        return estimate([run.figures[name] for run in self.runs])

    @property
    def num_collapsed(self) -> int:
        """Seeds whose reward fell, and stayed, below half of its best."""
        return sum(run.is_collapsed for run in self.runs)


@dataclass(frozen=True)
class Finding:
    """What an expectation came to."""

    expectation: Expectation
    difference: Contrast | None  # none without seeds that both have
    outcome: str


def read_results(grid: Grid, out: Path, seeds: Sequence[int], num_rollouts: int) -> dict[Cell, CellResult]:
    """Every cell; only runs with all their rollouts count."""
    found: dict[Cell, CellResult] = {}
    for cell in grid.cells:
        runs: list[RunResult] = []
        for seed in seeds:
            try:
                run = read_run(cell.folder(out, seed))
            except DataError:
                continue
            if len(run.rollouts) >= num_rollouts:
                runs.append(_result(run, seed, num_rollouts))
        found[cell] = CellResult(cell, tuple(runs))
    return found


def _result(run: Run, seed: int, num_rollouts: int) -> RunResult:
    """Of a run's first rollouts; it may have been resumed."""
    rollouts = run.rollouts[:num_rollouts]
    steps = [row for row in run.steps if row.rollout < num_rollouts]
    rewards = tuple(row.values["reward/mean"] for row in rollouts)
    last = rollouts[-LAST:]
    figures = {
        "reward_last": fmean(rewards[-LAST:]),
        "abs_prob_diff_last": _mean(row.values.get("mismatch/abs_prob_diff_mean") for row in last),
        "kl_k3_mean": _mean(row.values.get("mismatch/kl_k3") for row in rollouts),
        "kl_k3_last": _mean(row.values.get("mismatch/kl_k3") for row in last),
        "masked_positive": _mean(row.values.get("trust_region/masked_fraction_positive") for row in steps),
        "masked_negative": _mean(row.values.get("trust_region/masked_fraction_negative") for row in steps),
        "agreement": _mean(row.values.get("routing/agreement_mean") for row in rollouts),
    }
    return RunResult(seed, rewards, figures, is_collapsed(rewards))


def is_collapsed(rewards: Sequence[float]) -> bool:
    """Whether the mean of the last rollouts is below half of the best such mean of the run."""
    if len(rewards) <= LAST:
        return False
    means = np.convolve(np.asarray(rewards), np.full(LAST, 1 / LAST), mode="valid")
    return bool(means[-1] < COLLAPSED_BELOW * means.max())


def _mean(values: Any) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else math.nan


def findings(grid: Grid, results: Mapping[Cell, CellResult]) -> list[Finding]:
    """Each expectation, with what came out on the seeds that both of its cells have."""
    return [_finding(expectation, results) for expectation in grid.expectations]


def _finding(expectation: Expectation, results: Mapping[Cell, CellResult]) -> Finding:
    above = {run.seed: run.figures[expectation.metric] for run in results[expectation.above].runs}
    below = {run.seed: run.figures[expectation.metric] for run in results[expectation.below].runs}
    both = sorted(above.keys() & below.keys())
    if len(both) < 2:
        return Finding(expectation, None, "not measured: fewer than two seeds of both")
    difference = contrast([above[seed] for seed in both], [below[seed] for seed in both])
    return Finding(expectation, difference, outcome(difference))


def outcome(difference: Contrast) -> str:
    """In words, with the number of seeds that it rests on."""
    seeds = f"{difference.num_pairs} seeds"
    if difference.low > 0:
        return f"came out ({seeds})"
    if difference.high < 0:
        return f"the opposite came out ({seeds})"
    return f"not decided by {seeds}"
