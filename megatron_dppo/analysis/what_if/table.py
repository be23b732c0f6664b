"""Formats what-if results as tables for a terminal of 100 columns."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH = 100
_CELL = 8  # columns of the terminal
_MAX_NAME = WIDTH - 9 * _CELL

Row = Mapping[str, Any]


def at_factor(row: Row, factor: float, figure: str) -> float | None:
    """Return a number of a row with its main threshold scaled, or `None` if the rule has no threshold."""
    return next((each[figure] for each in row["sensitivity"] if each["factor"] == factor), None)


def mean_weight(row: Row) -> float | None:
    """Return the mean of M over tokens with A != 0."""
    return row["weight_mean"] if "weight_mean" in row else 1.0 - row["masked_fraction"]


def share(value: float | None) -> str:
    """Format a share as a percentage, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.2%}" if value < 0.9995 else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number to three decimals, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


# (first line of the heading, second line, text of a row)
COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("masked", "A>0", lambda row: share(row["masked_fraction_positive"])),
    ("share", "A<0", lambda row: share(row["masked_fraction_negative"])),
    ("mean", "M", lambda row: number(mean_weight(row))),
    ("grad.", "mass", lambda row: share(row["gradient_mass_kept"])),
    ("cosine", "no mask", lambda row: number(row["cosine_unmasked"])),
    ("with", "TopK TV", lambda row: number(row["cosine_dppo_topk_tv"])),
    ("agrees", "w. run", lambda row: share(row["agreement"])),
    ("masked", "at 1/2", lambda row: share(at_factor(row, 0.5, "masked_fraction"))),
    ("share", "at 2x", lambda row: share(at_factor(row, 2.0, "masked_fraction"))),
)


def as_text(found: Mapping[str, Any]) -> str:
    """Return one table for each kind of routes, and one with the spread over rollouts."""
    rollouts = ", ".join(map(str, found["rollouts"]))
    lines = [
        f"{found['num_tokens']:,} learning tokens of rollouts {rollouts}",
        f"weights {found['checkpoint']}",
    ]
    for routes, values in found["mismatch"].items():
        rows = [row for row in found["rows"] if row["routes"] == routes]
        lines.append("")
        lines.append(
            f"{routes} routes: mean |pi-mu| {values['abs_prob_diff_mean']:.2e}  k3 {values['kl_k3']:.2e}  "
            f"pi/mu {values['ratio_min']:.3g} .. {values['ratio_max']:.3g}"
        )
        lines += _table([row["variant"] for row in rows], COLUMNS, rows)
        if len(found["rollouts"]) > 1 and routes == found["trained_routes"]:
            lines += ["", f"{routes} routes, mean and standard deviation over rollouts"]
            lines += _table([row["variant"] for row in rows], SPREAD, rows)
    if found["left_out"]:
        lines.append("")
        lines += [f"left out: {name}, {why}" for name, why in found["left_out"].items()]
    lines += [
        "",
        "M: weight of a token's update, 0 where masked. grad. mass: sum of |M| min(r, C) |A| over that",
    ]
    lines += [
        "of M = 1. cosine: of the gradients by the last hidden states. at 1/2, 2x: of the main threshold."
    ]
    return "\n".join(lines)


def spread(row: Row, figure: str) -> tuple[float, float]:
    """Return mean and standard deviation of a figure over the rollouts that have it; NaN of none, or of one."""
    values = [each[figure] for each in row["by_rollout"] if each[figure] is not None]
    values = [value for value in values if not math.isnan(value)]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan


def _table(
    names: Sequence[str], columns: Sequence[tuple[str, str, Callable[[Row], str]]], rows: Sequence[Row]
) -> list[str]:
    """Return the lines of a table; a name that is too long gets its own line."""
    width = min(max(map(len, names)), _MAX_NAME)
    lines = [" " * width + "".join(f"{column[part]:>{_CELL}}" for column in columns) for part in (0, 1)]
    for name, row in zip(names, rows, strict=True):
        if len(name) > width:
            lines.append(name)
            name = ""
        lines.append(f"{name:{width}}" + "".join(f"{text(row):>{_CELL}}" for _, _, text in columns))
    return [line.rstrip() for line in lines]


def _of_spread(figure: str, part: int, form: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: form(spread(row, figure)[part])


SPREAD: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("masked", "mean", _of_spread("masked_fraction", 0, share)),
    ("share", "sd", _of_spread("masked_fraction", 1, share)),
    ("grad.", "mean", _of_spread("gradient_mass_kept", 0, share)),
    ("mass", "sd", _of_spread("gradient_mass_kept", 1, share)),
    ("cosine", "mean", _of_spread("cosine_unmasked", 0, number)),
    ("no mask", "sd", _of_spread("cosine_unmasked", 1, number)),
)
