"""Builds the report's figures as plain dictionaries for plotly.js. The page adds the colours.

A point is a number of metrics.jsonl. A smoothed curve is drawn in front of it, as `lines.curve_of` decides.
Runs that share a colour are the seeds of one line: one curve, their mean with its interval, is before them.
Metrics of step rows are averaged over a rollout's gradient steps, and bars over the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dppo.analysis.lines import (
    Points,
    can_be_logarithmic,
    curve_of,
    finite_mean,
    lines_of,
    over_rollouts,
    points_of,
)
from megatron_dppo.analysis.report.diagnostics import alarms_of
from megatron_dppo.run_folder.reader import MetricsRow, Run

Trace = dict[str, Any]

AXES_HEIGHT = 180  # pixels of one panel's axes
GAP = 76  # pixels between them: tick labels, axis title, the next panel's title
DASHES = ("solid", "dash", "dot", "dashdot")
COLOURS = 8  # the page has this many; further runs repeat them with the next dash
LAYER = re.compile(r"routing/agreement_layer_(\d+)$")
PHASES = ("rollout", "batch", "train", "sync")
MAX_POINTS_WITH_MARKERS = 60
MAX_LABELLED_PLACES = 8  # else plotly chooses round numbers
LEAST_FACTOR = 3.0  # between the ends of a logarithmic axis
MAX_RUNS_AT_ONCE = 12  # else pointing at a plot shows one curve's number, not all


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    metrics: tuple[str, ...]  # metrics to draw; the report explains missing ones
    log: bool = False
    x_title: str = "rollout"
    points: Callable[[Run, str], Points] | None = None  # None: the metric over the rollouts
    bars: bool = False
    bar_labels: tuple[str, ...] = PHASES
    unit: str = ""  # of bars
    band: tuple[str, str] | None = None  # metrics between which the first one's interval is shaded
    least: float = 0.0  # range that a linear y axis has at least
    least_share: float = 0.0  # the same as a share of the largest value


@dataclass(frozen=True)
class Section:
    """One card of the report: panels stacked under one sentence on how to read them."""

    id: str
    title: str
    reading: str
    panels: tuple[Panel, ...] = field(default=())
    folded: bool = False  # whether its plots are behind a summary

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that the section draws."""
        return tuple(name for panel in self.panels for name in panel.metrics)


def by_mini_step(run: Run, metric: str) -> Points:
    """Return the metric by the place of a gradient step in its rollout, from 0; means over the rollouts."""
    of_place: dict[int, list[float]] = {}
    for place, row in place_in_rollout(run):
        if metric in row.values:
            of_place.setdefault(place, []).append(row.values[metric])
    means = {place: finite_mean(values) for place, values in sorted(of_place.items())}
    return points_of(means.items())


def place_in_rollout(run: Run) -> Iterator[tuple[int, MetricsRow]]:
    """Yield each gradient step's row with its place in its rollout, from 0."""
    first = {row.rollout: row.step or 0 for row in reversed(run.steps)}
    for row in run.steps:
        if row.step is not None:
            yield row.step - first[row.rollout], row


def agreement_by_layer(run: Run, _metric: str) -> Points:
    """Return each layer's agreement, averaged over the rollouts."""
    numbers = sorted(
        {int(found[1]) for row in run.rollouts for name in row.values if (found := LAYER.match(name))}
    )
    means = {n: finite_mean(over_rollouts(run, f"routing/agreement_layer_{n}")[1]) for n in numbers}
    return points_of(means.items())


def seconds_by_phase(run: Run, _metric: str) -> Points:
    """Return the mean seconds of each phase, x counting phases."""
    means = [finite_mean(over_rollouts(run, f"time/{phase}_s")[1]) for phase in PHASES]
    return points_of(enumerate(means))


def shares_by_phase(run: Run, metric: str) -> Points:
    """Return each phase's percentage of the total time, x counting phases."""
    x, seconds = seconds_by_phase(run, metric)
    total = sum(seconds)
    return x, [100 * value / total if total else 0.0 for value in seconds]


def figure(
    section: Section, runs: Sequence[Run], names: Sequence[str], looks: Sequence[int]
) -> dict[str, Any] | None:
    """Return a plotly figure without the panels that no run has data for; None without any panel.

    `looks` are the numbers of the runs' colours and dashes, from `report.looks`.
    """
    drawn = [(panel, made) for panel in section.panels if (made := _panel_traces(panel, runs, names, looks))]
    if not drawn:
        return None
    data: list[Trace] = []
    marks = _marks(runs)
    axes_height = len(drawn) * AXES_HEIGHT + (len(drawn) - 1) * GAP  # pixels between the outermost margins
    margins = {"l": 44, "r": 8, "t": 28, "b": 44}
    layout: dict[str, Any] = {
        "height": axes_height + margins["t"] + margins["b"],
        "margin": margins,
        "hovermode": "x unified" if len(runs) <= MAX_RUNS_AT_ONCE else "closest",
        "barmode": "group",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "annotations": [],
        "shapes": [],
    }
    for index, (panel, traces) in enumerate(drawn):
        axis = "" if index == 0 else str(index + 1)
        top = 1 - index * (AXES_HEIGHT + GAP) / axes_height
        bottom = max(0.0, top - AXES_HEIGHT / axes_height)
        data += [{**trace, "xaxis": f"x{axis}", "yaxis": f"y{axis}"} for trace in traces]
        layout[f"xaxis{axis}"] = _x_axis(panel, traces, f"y{axis}")
        layout[f"yaxis{axis}"] = _y_axis(panel, traces, f"x{axis}", (bottom, top))
        layout["annotations"].append(panel_title(_title(panel, runs), top))
        if panel.points is None:
            place = {"xref": f"x{axis}", "yref": f"y{axis} domain"}
            layout["shapes"] += [{**mark, **place} for mark in marks]
    return {"data": data, "layout": layout}


def _panel_traces(panel: Panel, runs: Sequence[Run], names: Sequence[str], looks: Sequence[int]) -> list[Trace]:
    """Return the traces of each run and metric that has points; `meta` is the run's index."""
    metrics = panel.metrics[:1] if panel.points else panel.metrics
    found = [
        (index, position, points)
        for index, run in enumerate(runs)
        for position, metric in enumerate(metrics)
        if (points := (panel.points or over_rollouts)(run, metric))[0]
    ]
    is_log = panel.log and can_be_logarithmic(value for *_, (_, y) in found for value in y)
    labels = {place: line.label for line in lines_of(runs, names) for place in line.places}
    traces, means = list[Trace](), list[Trace]()
    for index, position, (x, y) in found:
        name, metric = names[index], metrics[position]
        if panel.band is not None and (between := _band(runs[index], panel.band, name, index)):
            traces.append(between)
        suffix = "" if position == 0 else f" ({metric.split('/')[0].split('_')[-1]})"
        dash = DASHES[(looks[index] // COLOURS + 2 * position) % len(DASHES)]
        label = f"{name}{suffix}"
        drawn = _bar(label, index, x, y, panel.unit) if panel.bars else _line(label, index, dash, x, y)
        alike = [(i, points) for i, p, points in found if (looks[i], p) == (looks[index], position)]
        is_first = alike[0][0] == index  # of the runs that share a colour, which are the seeds of a line
        curve = curve_of([points for _, points in alike], metric, is_log=is_log) if not panel.points else None
        is_alone = len(alike) == 1
        if curve is None or (is_alone and not curve.is_smoothed):
            traces.append(drawn)
            continue
        traces.append(drawn | {"opacity": 0.25, "mode": "lines"})
        if is_first:
            of = f"{label}, smoothed" if is_alone else f"{labels[index]}{suffix}, mean of {len(alike)} seeds"
            at = curve.x.tolist()
            if curve.low is not None and curve.high is not None:
                means.append(
                    _area(of, index, curve.x.tolist(), _six_digits(curve.low), _six_digits(curve.high))
                )
            means.append(_line(of, index, dash, curve.x.tolist(), _six_digits(curve.mean)) | {"mode": "lines"})
    return traces + means


def _six_digits(values: np.ndarray) -> list[float]:
    """Return the values with fewer digits, so that the page is smaller."""
    return [float(f"{value:.6g}") for value in values]


def _marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a line for each changed setting, and a short mark for each alarm; `name` is the run's index.

    They lack the axes that they are drawn on.
    """
    changes = sorted({(index, row.rollout + 0.5) for index, run in enumerate(runs) for row in run.changes})
    alarms = sorted({(index, alarm.rollout) for index, run in enumerate(runs) for alarm in alarms_of(run)})
    shapes = [(index, x, 0.0, 1.0, {"width": 1.5, "dash": "dot"}) for index, x in changes]
    for index, x in alarms:
        low = 0.06 * index % 0.3
        shapes.append((index, x, low, low + 0.05, {"width": 4}))
    return [
        {"type": "line", "name": str(index), "x0": x, "x1": x, "y0": low, "y1": high, "line": line}
        for index, x, low, high, line in shapes
    ]


def _x_axis(panel: Panel, traces: Sequence[Trace], anchor: str) -> dict[str, Any]:
    """Return the x axis, with a tick for each bar, or for each position if there are few."""
    title = {"text": panel.x_title, "font": {"size": 12}, "standoff": 6}
    axis: dict[str, Any] = {"anchor": anchor, "title": title}
    if panel.bars:
        axis["title"] = title if panel.x_title else {}
        labels = list(panel.bar_labels)
        return {**axis, "tickvals": list(range(len(labels))), "ticktext": labels, "tickangle": 0}
    places = sorted({x for trace in traces for x in trace["x"]})
    return {**axis, "tickvals": places} if len(places) <= MAX_LABELLED_PLACES else {**axis, "nticks": 9}


def _y_axis(panel: Panel, traces: Sequence[Trace], anchor: str, domain: tuple[float, float]) -> dict[str, Any]:
    """Return the y axis. A linear one has at least the panel's range, so that noise does not fill it."""
    values = [value for trace in traces for value in trace["y"] if value is not None]
    axis: dict[str, Any] = {"anchor": anchor, "domain": list(domain), "automargin": True, "nticks": 6}
    if panel.bars:  # from 0, with space for the bars' numbers
        return axis | {"range": [0, 1.15 * max(values, default=1.0)], "exponentformat": "e"}
    if panel.log and can_be_logarithmic(values):
        return axis | _log_ticks(min(values), max(values))
    axis["exponentformat"] = "e"
    least = max(panel.least, panel.least_share * max(map(abs, values), default=0.0))
    if values and max(values) - min(values) < least:
        axis["range"] = _widen(min(values), max(values), least)
    return axis


def _widen(low: float, high: float, least: float) -> list[float]:
    """Return a range of `least` about the values. It crosses 0 or 1 only if the values do."""
    start = (low + high - least) / 2
    if low >= 0:
        start = max(start, -0.02 * least)
    if high <= 1:
        start = min(start, 1 + 0.02 * least - least)
    return [min(start, low), max(start + least, high)]


def _log_ticks(lowest: float, highest: float) -> dict[str, Any]:
    """Return powers of ten as ticks, with 2 and 5 times them if decades are few, and more ticks within one."""
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
    """Return the title annotation of a panel with axes that end at `top`."""
    place = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
    return {"text": text, **place, "yshift": 3, "showarrow": False}


def _line(label: str, run: int, dash: str, x: list[float], y: list[float]) -> Trace:
    return {
        "type": "scatter",
        "name": label,
        "meta": run,
        "mode": "lines+markers" if len(x) <= MAX_POINTS_WITH_MARKERS else "lines",
        "x": x,
        "y": [_or_gap(value) for value in y],
        "line": {"width": 1.8, "dash": dash},
        "marker": {"size": 4},
        "hovertemplate": "%{y:.5g}",
    }


def _band(run: Run, limits: tuple[str, str], label: str, index: int) -> Trace | None:
    """Return the area between two metrics, behind the curve, or `None` if the run lacks one of them."""
    low, high = (over_rollouts(run, metric) for metric in limits)
    if not low[0] or low[0] != high[0] or not all(map(math.isfinite, low[1] + high[1])):
        return None
    return _area(label, index, low[0], low[1], high[1])


def _area(label: str, index: int, x: list[float], low: list[float], high: list[float]) -> Trace:
    return {
        "type": "scatter",
        "name": f"{label}, interval",
        "meta": index,
        "mode": "lines",
        "x": x + x[::-1],
        "y": [_or_gap(value) for value in low + high[::-1]],
        "line": {"width": 0},
        "fill": "toself",
        "opacity": 0.4,
        "hoverinfo": "skip",
    }


def _bar(label: str, run: int, x: list[float], y: list[float], unit: str) -> Trace:
    return {
        "type": "bar",
        "name": label,
        "meta": run,
        "x": x,
        "y": [_or_gap(value) for value in y],
        "textfont": {"size": 10},
        "texttemplate": "%{y:.2~g}",
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"%{{y:.4g}}{unit}",
    }


def _or_gap(value: float) -> float | None:
    """Return null, which plotly draws as a gap, for values that are not finite."""
    return value if math.isfinite(value) else None


def _title(panel: Panel, runs: Sequence[Run]) -> str:
    """Return the panel's title, with a note if a point is the mean of several rows."""
    has_steps_only = not panel.points and any(
        any(metric in row.values for row in run.steps) and not any(metric in row.values for row in run.rollouts)
        for run in runs
        for metric in panel.metrics
    )
    return f"{panel.title}, mean of gradient steps" if has_steps_only else panel.title
