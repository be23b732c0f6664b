"""Formats what-if results as tables for a terminal of 100 columns, and draws them for `what_if.html`."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from megatron_dppo.analysis.figures.canvas import Drawing, build, render
from megatron_dppo.analysis.what_if.measures import PROB_EDGES

WIDTH = 100
_CELL = 8  # columns of the terminal
_MAX_NAME = WIDTH - 9 * _CELL

Row = Mapping[str, Any]
_LEGEND = (
    "M: weight of a token's update, 0 where masked. grad. mass: sum of |M| min(r, C) |A| over that",
    "of M = 1. cosine: of the gradients by the last hidden states. at 1/2, 2x: of the main threshold.",
)


def share(value: float | None) -> str:
    """Format a share as a percentage, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.2%}" if value < 0.9995 else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number to three decimals, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _mean_weight(row: Row) -> float:
    return row["weight_mean"] if "weight_mean" in row else 1.0 - row["masked_fraction"]


def _at_factor(row: Row, factor: float) -> float | None:
    return next((each["masked_fraction"] for each in row["sensitivity"] if each["factor"] == factor), None)


# Two lines of a heading, the figure of a row, and its format.
_COLUMNS: Sequence[tuple[str, str, Callable[[Row], float | None], Callable[[float | None], str]]] = (
    ("masked", "A>0", lambda row: row["masked_fraction_positive"], share),
    ("share", "A<0", lambda row: row["masked_fraction_negative"], share),
    ("mean", "M", _mean_weight, number),
    ("grad.", "mass", lambda row: row["gradient_mass_kept"], share),
    ("cosine", "no mask", lambda row: row["cosine_unmasked"], number),
    ("with", "TopK TV", lambda row: row["cosine_dppo_topk_tv"], number),
    ("agrees", "w. run", lambda row: row["agreement"], share),
    ("masked", "at 1/2", partial(_at_factor, factor=0.5), share),
    ("share", "at 2x", partial(_at_factor, factor=2.0), share),
)
_SPREAD = (
    ("masked", "share", "masked_fraction", share),
    ("grad.", "mass", "gradient_mass_kept", share),
    ("cosine", "no mask", "cosine_unmasked", number),
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
        lines += [
            "",
            f"{routes} routes: mean |pi-mu| {values['abs_prob_diff_mean']:.2e}  k3 {values['kl_k3']:.2e}  "
            f"pi/mu {values['ratio_min']:.3g} .. {values['ratio_max']:.3g}",
        ]
        headings = [(first, second) for first, second, *_ in _COLUMNS]
        lines += _table(rows, headings, [[form(value(row)) for *_, value, form in _COLUMNS] for row in rows])
        if len(found["rollouts"]) > 1 and routes == found["trained_routes"]:
            headings = [pair for first, second, *_ in _SPREAD for pair in ((first, "mean"), (second, "sd"))]
            cells = [[form(part) for *_, key, form in _SPREAD for part in _spread(row, key)] for row in rows]
            lines += ["", f"{routes} routes, mean and standard deviation over rollouts"]
            lines += _table(rows, headings, cells)
    if found["left_out"]:
        lines += ["", *(f"left out: {name}, {why}" for name, why in found["left_out"].items())]
    return "\n".join([*lines, "", *_LEGEND])


def _spread(row: Row, figure: str) -> tuple[float, float]:
    """Return mean and standard deviation of a figure over the rollouts that have it; NaN of none, or of one."""
    values = [each[figure] for each in row["by_rollout"] if each[figure] is not None]
    values = [value for value in values if not math.isnan(value)]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan


def _table(
    rows: Sequence[Row], headings: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]
) -> list[str]:
    """Return the lines of a table; a name that is too long gets its own line."""
    width = min(max(len(row["variant"]) for row in rows), _MAX_NAME)
    lines = [" " * width + "".join(f"{heading[part]:>{_CELL}}" for heading in headings) for part in (0, 1)]
    for row, texts in zip(rows, cells, strict=True):
        name = row["variant"]
        if len(name) > width:
            lines.append(name)
            name = ""
        lines.append(f"{name:{width}}" + "".join(f"{text:>{_CELL}}" for text in texts))
    return [line.rstrip() for line in lines]


def page(found: Mapping[str, Any]) -> str:
    """Return the tables and drawings as HTML that opens without a network."""
    title = escape(f"what-if: {found['run']}")
    drawings = (render(build(drawing), "svg").decode() for drawing in drawings_of(found))
    figures = "\n".join(svg[svg.index("<svg") :] for svg in drawings)
    same = found["agreement"][found["trained_routes"]]["same_decision"]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body { margin: 2em; } svg { display: block; max-width: 100%; height: auto; }\n"
        "td { text-align: right; } th { text-align: left; white-space: nowrap; }</style>\n"
        f"<h1>{title}</h1>\n<pre>{escape(as_text(found))}</pre>\n{figures}\n"
        f"<h2>Tokens with A &ne; 0 that both mask or both keep, {found['trained_routes']} routes</h2>\n"
        f"{_pairs(found['variants'], same)}\n</html>\n"
    )


def _pairs(names: Sequence[str], same: Sequence[Sequence[float]]) -> str:
    """Return a table of HTML with the agreement of all pairs; those that agree less are darker."""
    numbers = "".join(f"<td>{place}</td>" for place in range(1, len(names) + 1))
    rows = [f"<tr><td></td>{numbers}</tr>"]
    for place, (name, values) in enumerate(zip(names, same, strict=True), 1):
        shades = [0.0 if math.isnan(value) else 1.0 - value for value in values]
        cells = (
            f'<td style="background: rgba(0, 90, 200, {shade:.2f})">{share(value)}</td>'
            for value, shade in zip(values, shades, strict=True)
        )
        rows.append(f"<tr><th>{place} {escape(name)}</th>{''.join(cells)}</tr>")
    return "\n".join(["<table>", *rows, "</table>"])


def drawings_of(found: Mapping[str, Any]) -> Iterator[Drawing]:
    """Yield 1 - mean M by probability and by threshold, with a panel for each variant and one scale.

    They show the routes that trained. 1 - mean M is the masked share of a mask.
    """
    rows = [row for row in found["rows"] if row["routes"] == found["trained_routes"]]
    routes = f"{found['trained_routes']} routes"
    for key, by, draw in (
        ("by_prob", "mu, the rollout's probability", _draw_bars),
        ("sensitivity", "the main threshold times this", _draw_line),
    ):
        drawn = [row for row in rows if any(map(_reduction, row[key]))]
        top = max([_reduction(each) for row in drawn for each in row[key]], default=0.0)
        panels = [partial(draw, row=row, top=top) for row in drawn]
        if panels:
            yield Drawing(key, "", f"1 - mean M by {by}; {routes}", panels, ())


def _reduction(figures: Row) -> float:
    """Return 1 - mean M, or 0 without tokens."""
    mean = figures["weight_mean"]
    return 0.0 if mean is None or math.isnan(mean) else max(1.0 - mean, 0.0)


def _draw_bars(axes: Axes, row: Row, top: float) -> None:
    places = np.arange(len(PROB_EDGES) - 1)
    for sign, label, left in (("positive", "A > 0", 0.1), ("negative", "A < 0", 0.5)):
        heights = [_reduction(each) for each in row["by_prob"] if each["sign"] == sign]
        axes.bar(places + left, heights, width=0.4, align="edge", label=label)
    axes.set_xticks(np.arange(len(PROB_EDGES)), [f"{edge:g}" for edge in PROB_EDGES])
    _finish(axes, row["variant"], top)


def _draw_line(axes: Axes, row: Row, top: float) -> None:
    factors = [each["factor"] for each in row["sensitivity"]]
    axes.plot(np.log2(factors), [_reduction(each) for each in row["sensitivity"]], marker="o")
    axes.set_xticks(np.log2(factors), [f"{factor:g}\u00d7" for factor in factors])
    _finish(axes, f"{row['variant']}: {row['threshold']}", top)


def _finish(axes: Axes, title: str, top: float) -> None:
    axes.set_ylim(0, 1.05 * top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(title)
