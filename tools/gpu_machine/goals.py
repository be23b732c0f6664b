"""Compares the figures of the losses with their goals."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchmarks.loss import DEAD_SHARES
from tools.benchmarks.loss_goals import GOALS, GoalResult

OUTCOMES = ("met", "missed", "not measured")


@dataclass(frozen=True)
class CaseGoals:
    """Results of all goals for one shape and share of dead rows."""

    case: str  # "tp1, 30 % dead rows"
    results: tuple[GoalResult, ...]


def case_goals(shape: str, figures: Path | None) -> list[CaseGoals]:
    """Return the result of every goal for each case of a shape.

    Args:
        shape: Name of the shape.
        figures: File written by tools.benchmarks.loss. If it is `None` or missing, no goal was measured.
    """
    cases: list[dict[str, Any]] = []
    if figures is not None and figures.exists():
        cases = json.loads(figures.read_text(encoding="utf-8"))["cases"]
    by_share = {case["dead_share"]: case["goals"] for case in cases if case["shape"]["name"] == shape}
    nothing = tuple(GoalResult(goal.words, None, "not measured") for goal in GOALS)
    return [
        CaseGoals(
            f"{shape}, {share:.0%} dead rows",
            tuple(GoalResult(**goal) for goal in by_share[share]) if share in by_share else nothing,
        )
        for share in DEAD_SHARES
    ]


def counts(cases: Sequence[CaseGoals]) -> str:
    """Return how many goals were met, missed and not measured, as text."""
    outcomes = Counter(result.outcome for case in cases for result in case.results)
    return ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES)


def lines(cases: Sequence[CaseGoals]) -> list[str]:
    """Return a line per missed goal and case with its figure, then a line per other goal for all its cases."""
    shown = [f"{'missed':<13} {_with_figure(case, goal)}" for case, goal in _of(cases, "missed")]
    for outcome in ("met", "not measured"):
        by_goal: dict[str, list[str]] = {}
        for case, goal in _of(cases, outcome):
            figure = "" if goal.figure is None else f" {goal.figure:.2f}"
            by_goal.setdefault(goal.goal, []).append(case.case.split(" dead")[0] + figure)
        for goal, where in by_goal.items():
            shown.append(
                f"{outcome:<13} {goal}: {'; '.join(where) if outcome == 'met' else f'{len(where)} cases'}"
            )
    return shown


def _of(cases: Sequence[CaseGoals], outcome: str) -> list[tuple[CaseGoals, GoalResult]]:
    return [(case, goal) for case in cases for goal in case.results if goal.outcome == outcome]


def _with_figure(case: CaseGoals, goal: GoalResult) -> str:
    figure = "" if goal.figure is None else f": {goal.figure:.2f}"
    return f"{goal.goal}{figure} ({case.case})"
