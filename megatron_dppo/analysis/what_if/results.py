"""Formats what-if results as tables for a terminal of 100 columns, and as `what_if.html`.

The page's drawings are SVG and shaded cells without a script, in the colours of the report.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.analysis.pages import page_templates
from megatron_dppo.analysis.what_if.measures import FACTORS, PROB_EDGES

WIDTH = 100
_CELL = 8  # columns of the terminal
_MAX_NAME = WIDTH - 9 * _CELL

Row = Mapping[str, Any]
_WIDTH, _HEIGHT = 260, 132  # of a panel, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 6, 16, 24
_SMALLEST_TOP = 0.01  # of an axis of shares


def at_factor(row: Row, factor: float, figure: str) -> float | None:
    """Return a row's `figure` for a scaled main threshold, or `None` if the rule has no threshold."""
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


@dataclass(frozen=True)
class Column:
    """A number of each variant: its format, and its headings in the terminal and on the page."""

    terminal: tuple[str, str] | None  # two lines; None: on the page only
    heading: str
    explanation: str
    form: Callable[[float | None], str]
    value: str | Callable[[Row], float | None]  # key of the row, or a function of it

    def text(self, row: Row) -> str:
        """Return the number of a variant as text."""
        return self.form(row[self.value] if isinstance(self.value, str) else self.value(row))


_OF_SIGN = "Share of these tokens with M = 0"
_OTHER = "The other is {} with its usual delta and all columns that were kept"
_SAME = "Share of tokens with A other than 0 that both mask or both keep"
_MASS = "Sum of |M| min(r, C) |A| over the same sum with M = 1"
_NO_MASK = "Gradients by the last hidden states; the other is pg_is with the same cap"
_MU = "Probability of the masked tokens under the rollout policy"
_HALF, _TWICE = (partial(at_factor, factor=factor, figure="masked_fraction") for factor in (0.5, 2.0))
_TV, _KL = (_OTHER.format(f"dppo_topk_{divergence}") for divergence in ("tv", "kl"))
COLUMNS = (
    Column(("masked", "A>0"), "masked, A\u00a0>\u00a00 [%]", _OF_SIGN, share, "masked_fraction_positive"),
    Column(("share", "A<0"), "masked, A\u00a0<\u00a00 [%]", _OF_SIGN, share, "masked_fraction_negative"),
    Column(("mean", "M"), "mean M", "Over tokens with A other than 0", number, mean_weight),
    Column(("grad.", "mass"), "gradient mass kept [%]", _MASS, share, "gradient_mass_kept"),
    Column(("cosine", "no mask"), "cosine with no mask", _NO_MASK, number, "cosine_unmasked"),
    Column(("with", "TopK TV"), "cosine with Top\u2011K TV", _TV, number, "cosine_dppo_topk_tv"),
    Column(None, "cosine with Top\u2011K KL", _KL, number, "cosine_dppo_topk_kl"),
    Column(("agrees", "w. run"), "agrees with the run's [%]", _SAME, share, "agreement"),
    Column(None, "mean μ of masked", _MU, number, "rollout_prob_masked"),
    Column(("masked", "at 1/2"), "masked at half the threshold [%]", "Main threshold halved", share, _HALF),
    Column(("share", "at 2x"), "at twice [%]", "Main threshold doubled", share, _TWICE),
)
# Columns of means and standard deviations over rollouts: the terminal's headings, the page's, key, format.
SPREAD = (
    ("masked", "share", "masked [%]", "masked_fraction", share),
    ("grad.", "mass", "gradient mass kept [%]", "gradient_mass_kept", share),
    ("cosine", "no mask", "cosine with no mask", "cosine_unmasked", number),
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
        shown = [column for column in COLUMNS if column.terminal is not None]
        cells = [[column.text(row) for column in shown] for row in rows]
        lines += _table(rows, [column.terminal for column in shown if column.terminal], cells)
        if len(found["rollouts"]) > 1 and routes == found["trained_routes"]:
            headings = [pair for first, second, *_ in SPREAD for pair in ((first, "mean"), (second, "sd"))]
            cells = [[form(part) for *_, key, form in SPREAD for part in spread(row, key)] for row in rows]
            lines += ["", f"{routes} routes, mean and standard deviation over rollouts"]
            lines += _table(rows, headings, cells)
    if found["left_out"]:
        lines.append("")
        lines += [f"left out: {name}, {why}" for name, why in found["left_out"].items()]
    lines += [
        "",
        "M: weight of a token's update, 0 where masked. grad. mass: sum of |M| min(r, C) |A| over that",
        "of M = 1. cosine: of the gradients by the last hidden states. at 1/2, 2x: of the main threshold.",
    ]
    return "\n".join(lines)


def spread(row: Row, figure: str) -> tuple[float, float]:
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


def write_page(file: Path, found: Mapping[str, Any]) -> None:
    """Write the page from the result of the what-if evaluation. It opens without a network."""
    file.write_text(page(found), encoding="utf-8")


def page(found: Mapping[str, Any]) -> str:
    """Return the page as HTML."""
    trained = found["trained_routes"]
    kinds = list(dict.fromkeys([trained, *(row["routes"] for row in found["rows"])]))
    rows = [row for row in found["rows"] if row["routes"] == trained]
    drawn = [row for row in rows if any(_reduction(each) for each in row["by_prob"])]
    with_threshold = [row for row in rows if row["sensitivity"]]
    report = page_templates("megatron_dppo.analysis.report")
    assert report.loader is not None, "page_templates gives one"
    style, _, _ = report.loader.get_source(report, "report.css")
    return (
        page_templates("megatron_dppo.analysis.what_if")
        .get_template("what_if.html.j2")
        .render(
            found=found,
            style=style,
            columns=COLUMNS,
            tables=[(routes, [row for row in found["rows"] if row["routes"] == routes]) for routes in kinds],
            spread=_spread(rows) if len(found["rollouts"]) > 1 else None,
            bars=_bar_panels(drawn),
            undrawn=[row["variant"] for row in rows if row not in drawn],
            cells=_cells(found["agreement"][trained]["same_decision"]),
            lines=_line_panels(with_threshold),
            unscaled=[row["variant"] for row in rows if not row["sensitivity"]],
            size=(_WIDTH, _HEIGHT),
            plot={"left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM},
        )
    )


def _reduction(figures: Mapping[str, Any]) -> float:
    """Return 1 - mean M, which is the masked share of a mask, or 0 without tokens."""
    mean = figures["weight_mean"]
    return 0.0 if mean is None or math.isnan(mean) else max(1.0 - mean, 0.0)


def _bin_names() -> list[str]:
    return [f"{low:g}\u2013{high:g}" for low, high in itertools.pairwise(PROB_EDGES)]


def _axis(values: Sequence[float]) -> tuple[float, list[dict[str, Any]]]:
    """Return the top of an axis of shares, a round number above all values, and its ticks."""
    highest = max([*values, _SMALLEST_TOP])
    steps = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    top = next((step for step in steps if step >= highest), 1.0)
    return top, [{"y": _y(part * top, top), "text": f"{100 * part * top:.3g}%"} for part in (0.0, 0.5, 1.0)]


def _y(value: float, top: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(value / top, 1.0), 1)


def _bar_panels(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a panel of bars for each row: 1 - mean M by bin of mu, a bar for each sign of A."""
    top, ticks = _axis([_reduction(each) for row in rows for each in row["by_prob"]])
    names = _bin_names()
    step = (_WIDTH - _LEFT - _RIGHT) / len(names)
    panels: list[dict[str, Any]] = []
    for row in rows:
        bars: list[dict[str, Any]] = []
        for index, each in enumerate(row["by_prob"]):
            place, is_negative = index % len(names), each["sign"] == "negative"
            y = _y(_reduction(each), top)
            sign = "A < 0" if is_negative else "A > 0"
            bars.append(
                {
                    "x": round(_LEFT + step * (place + (0.51 if is_negative else 0.13)), 1),
                    "y": y,
                    "width": round(step * 0.36, 1),
                    "height": round(_HEIGHT - _BOTTOM - y, 1),
                    "sign": each["sign"],
                    "text": f"{sign}, μ {names[place]}: masked {share(each['masked_fraction'])}, mean M "
                    f"{number(each['weight_mean'])}, of {each['num_tokens']:,} tokens",
                }
            )
        panels.append({"name": row["variant"], "bars": bars})
    labels = [
        {"x": round(_LEFT + step * index, 1), "text": f"{edge:g}"} for index, edge in enumerate(PROB_EDGES)
    ]
    return {"panels": panels, "ticks": ticks, "labels": labels}


def _line_panels(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a panel for each row: 1 - mean M over the main threshold's factor, on a log scale."""
    top, ticks = _axis([_reduction(each) for row in rows for each in row["sensitivity"]])
    inner = _WIDTH - _LEFT - _RIGHT
    places = {factor: _LEFT + inner * (0.12 + 0.38 * index) for index, factor in enumerate(FACTORS)}
    panels: list[dict[str, Any]] = []
    for row in rows:
        points = [
            {
                "x": round(places[each["factor"]], 1),
                "y": _y(_reduction(each), top),
                "text": share(_reduction(each)),
            }
            for each in row["sensitivity"]
        ]
        panels.append({"name": row["variant"], "threshold": row["threshold"], "points": points})
    labels = [{"x": round(x, 1), "text": f"{factor:g}\u00d7"} for factor, x in places.items()]
    return {"panels": panels, "ticks": ticks, "labels": labels}


def _cells(shares: Sequence[Sequence[float]]) -> list[list[dict[str, Any]]]:
    """Return text and shade, in percent, of each pair; the pair that agrees least has the deepest shade."""
    known = [value for row in shares for value in row if not math.isnan(value)]
    largest = max([1.0 - value for value in known] + [1e-9])
    return [[_cell(value, largest) for value in row] for row in shares]


def _cell(value: float, largest: float) -> dict[str, Any]:
    if math.isnan(value):
        return {"text": "\u2013", "shade": 0, "exact": "no tokens"}
    text = "100" if value == 1.0 else f"{min(value, 0.999):.1%}".rstrip("%")
    return {"text": text, "shade": round(45 * (1.0 - value) / largest), "exact": f"{value:.3%}"}


def _spread(rows: Sequence[Row]) -> dict[str, Any]:
    """Return mean and standard deviation of some figures over the rollouts, as texts."""
    texts: list[tuple[str, list[str]]] = []
    for row in rows:
        cells: list[str] = []
        for *_, key, form in SPREAD:
            mean, deviation = spread(row, key)
            cells.append(form(mean) if math.isnan(deviation) else f"{form(mean)} \u00b1 {form(deviation)}")
        texts.append((row["variant"], cells))
    return {"headings": [heading for _, _, heading, *_ in SPREAD], "rows": texts}
