"""Input of the figures, and the reason why a figure cannot be drawn of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.runs import SCORE, Experiment, Line
from megatron_dppo.analysis.figures.tokens import TokenPairs


@dataclass(frozen=True)
class Material:
    """Contents of the named folders."""

    experiments: Sequence[Experiment]
    tokens: Sequence[TokenPairs]
    tokens_at: int | None = None  # rollout of the masked tokens, from 1; None means the last listed one
    is_mu_logarithmic: bool = False  # the axis of mu of single tokens

    @property
    def lines(self) -> list[Line]:
        """Lines of all experiments."""
        return [line for experiment in self.experiments for line in experiment.lines]


@dataclass(frozen=True)
class Lacking:
    """The reason why a figure is not drawn, and what to set."""

    found: str
    action: str


@dataclass(frozen=True)
class Kind:
    """One of the paper's figures, or one that completes them."""

    name: str
    paper: str  # its numbers, as captions say them; empty without a counterpart
    draw: Callable[[Kind, Material], list[Drawing] | Lacking]
    needs_runs: bool = True  # or can be drawn of formulas alone


def scores_of(lines: Sequence[Line]) -> list[str]:
    """Return the names of the evaluation scores that any of these lines has."""
    return sorted(
        {metric for line in lines for run in line.runs for metric in run.curves if SCORE.fullmatch(metric)}
    )


def has(lines: Sequence[Line], metric: str) -> bool:
    """Whether any of these lines has values of the metric."""
    return any(metric in run.curves for line in lines for run in line.runs)
