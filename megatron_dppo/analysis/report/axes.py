"""Axes and titles of the report's panels, as plain dictionaries for plotly.js."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

MAX_LABELLED_PLACES = 8  # else plotly chooses round numbers
LEAST_FACTOR = 3.0  # between the ends of a logarithmic axis


def x_axis(title: str, anchor: str, places: Iterable[float], bar_labels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the x axis, with a tick for each bar, or for each position if there are few."""
    axis: dict[str, Any] = {"anchor": anchor, "title": {"text": title, "font": {"size": 12}, "standoff": 6}}
    if bar_labels:
        axis["title"] = axis["title"] if title else {}
        ticks = {"tickvals": list(range(len(bar_labels))), "ticktext": list(bar_labels), "tickangle": 0}
        return {**axis, **ticks}
    shown = sorted(set(places))
    return {**axis, "tickvals": shown} if len(shown) <= MAX_LABELLED_PLACES else {**axis, "nticks": 9}


def y_axis(
    values: Sequence[float], anchor: str, domain: tuple[float, float], *, log: bool, bars: bool, least: float
) -> dict[str, Any]:
    """Return the y axis, logarithmic only where every value can be shown so: a zero would silently vanish.

    Args:
        values: What is drawn; without gaps.
        anchor: Name of the x axis.
        domain: Range of the panel, in parts of the figure's height.
        log: Whether a logarithmic axis is wanted.
        bars: Whether the axis begins at 0 and leaves room for the bars' numbers.
        least: Range that a linear axis has at least, so that noise does not fill it; 0 for none.
    """
    is_log = is_logarithmic(values, log)
    axis: dict[str, Any] = {"anchor": anchor, "domain": list(domain), "automargin": True, "nticks": 6}
    if bars:
        return axis | {"range": [0, 1.15 * max(values, default=1.0)], "exponentformat": "e"}
    if is_log:
        return axis | _log_ticks(min(values), max(values))
    axis["exponentformat"] = "e"
    if values and max(values) - min(values) < least:
        axis["range"] = _widened(min(values), max(values), least)
    return axis


def is_logarithmic(values: Sequence[float], log: bool) -> bool:
    """Whether an axis that is wanted logarithmic can show every value so."""
    return log and min(values, default=0) > 0


def _widened(low: float, high: float, least: float) -> list[float]:
    """Return a range of `least` about the values. It crosses 0 or 1 only if the values do."""
    start = (low + high - least) / 2
    if low >= 0:
        start = max(start, -0.02 * least)
    if high <= 1:
        start = min(start, 1 + 0.02 * least - least)
    return [min(start, low), max(start + least, high)]


def _log_ticks(lowest: float, highest: float) -> dict[str, Any]:
    """Return powers of ten, with 2 and 5 times them where few decades are shown, and more within one."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    digits = (1, 1.5, 2, 3, 4, 5, 6, 8) if highest < 4 * lowest else digits
    step = max(1, (last - first) // 6)
    ticks = [float(f"{digit}e{exponent}") for exponent in range(first, last + 1, step) for digit in digits]
    axis = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    if highest < LEAST_FACTOR * lowest:
        middle, half = math.log10(lowest * highest) / 2, math.log10(LEAST_FACTOR) / 2
        axis["range"] = [middle - half, middle + half]
    return axis


def panel_title(text: str, top: float) -> dict[str, Any]:
    """Return the annotation that stands over a panel whose axes end at `top`."""
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, **place, "yshift": 3, "showarrow": False}
