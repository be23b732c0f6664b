"""Builds the report's figures as plain dictionaries for plotly.js. Colours belong to the page, not to them.

A point is the number of a rollout's row in metrics.jsonl as it stands; from ten points on a smoothed curve
stands before it. What only step rows have is the mean of the rollout's gradient steps; bars and the agreement
of single layers are means over the run, and their titles say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from megatron_dppo.analysis.report.axes import is_logarithmic, panel_title, x_axis, y_axis
from megatron_dppo.analysis.report.smoothing import MIN_POINTS, smoothed
from megatron_dppo.analysis.report.stability import alarms_of
from megatron_dppo.run_folder.reader import MetricsRow, Run

Points = tuple[list[float], list[float]]
Trace = dict[str, Any]

AXES_HEIGHT = 180  # pixels of one panel's axes
GAP = 76  # pixels between them: tick labels, axis title, the next panel's title
DASHES = ("solid", "dash", "dot", "dashdot")
COLOURS = 8  # the page has this many; further runs repeat them with the next dash
LAYER = re.compile(r"routing/agreement_layer_(\d+)$")
PHASES = ("rollout", "batch", "train", "sync")
MAX_POINTS_WITH_MARKERS = 60
MAX_RUNS_AT_ONCE = 12  # else pointing at a plot shows one curve's number, not all


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    metrics: tuple[str, ...]  # metrics to draw; the report explains missing ones
    log: bool = False
    x_title: str = "rollout"
    points: Callable[[Run, str], Points] | None = None  # none: the metric over the rollouts
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


def over_rollouts(run: Run, metric: str) -> Points:
    """Return the metric by rollout, from rollout rows; else the mean of each rollout's gradient steps.

    Rollouts count from 1, as in the log; an evaluation stands at the number of rollouts before it.
    """
    rows = [(row.rollout + 1.0, row.values) for row in run.rollouts]
    rows += [(float(row.rollout), row.values) for row in run.evaluations]
    if found := [(rollout, values[metric]) for rollout, values in rows if metric in values]:
        return points_of(found)
    of_rollout: dict[int, list[float]] = {}
    for row in run.steps:
        if metric in row.values:
            of_rollout.setdefault(row.rollout, []).append(row.values[metric])
    return [rollout + 1.0 for rollout in of_rollout], [fmean(values) for values in of_rollout.values()]


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


def finite_mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values; none without any."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def points_of(values: Iterable[tuple[float, float | None]]) -> Points:
    """Return the points (x, y) whose y is known."""
    known = [(float(x), y) for x, y in values if y is not None]
    return [x for x, _ in known], [y for _, y in known]


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
    """Return the percentage of its phases' time that each phase takes, x counting phases."""
    x, seconds = seconds_by_phase(run, metric)
    total = sum(seconds)
    return x, [100 * value / total if total else 0.0 for value in seconds]


def figure(
    section: Section, runs: Sequence[Run], names: Sequence[str], looks: Sequence[int]
) -> dict[str, Any] | None:
    """Return a plotly figure without the panels that no run has data for; None without any panel.

    `looks` number the runs' colours and dashes, as `report.looks` gives them.
    """
    drawn = [
        (panel, traces) for panel in section.panels if (traces := _panel_traces(panel, runs, names, looks))
    ]
    if not drawn:
        return None
    data: list[Trace] = []
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
        places = (x for trace in traces for x in trace["x"])
        layout[f"xaxis{axis}"] = x_axis(
            panel.x_title, f"y{axis}", places, panel.bar_labels if panel.bars else ()
        )
        layout[f"yaxis{axis}"] = _y_axis(panel, traces, f"x{axis}", (bottom, top))
        layout["annotations"].append(panel_title(_title(panel, runs), top))
        if panel.points is None:
            layout["shapes"] += _change_lines(runs, axis) + _alarm_marks(runs, axis)
    return {"data": data, "layout": layout}


def _panel_traces(panel: Panel, runs: Sequence[Run], names: Sequence[str], looks: Sequence[int]) -> list[Trace]:
    """Return one trace per run and metric that has points; `meta` is the run's index, which sets its colour."""
    traces: list[Trace] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        for position, metric in enumerate(panel.metrics[:1] if panel.points else panel.metrics):
            x, y = (panel.points or over_rollouts)(run, metric)
            if not x:
                continue
            if panel.band is not None and (between := _band(run, panel.band, name, index)):
                traces.append(between)
            label = name if position == 0 else f"{name} ({metric.split('/')[0].split('_')[-1]})"
            dash = DASHES[(looks[index] // COLOURS + 2 * position) % len(DASHES)]
            drawn = _bar(label, index, x, y, panel.unit) if panel.bars else _line(label, index, dash, x, y)
            if panel.points is None and panel.band is None and len(x) >= MIN_POINTS:
                log = is_logarithmic([value for value in y if math.isfinite(value)], panel.log)
                before = _line(f"{label}, smoothed", index, dash, x, _rounded(smoothed(y, x, log=log)))
                traces += [drawn | {"opacity": 0.25, "mode": "lines"}, before | {"mode": "lines"}]
            else:
                traces.append(drawn)
    return traces


def _change_lines(runs: Sequence[Run], axis: str) -> list[dict[str, Any]]:
    """Return vertical lines before the first rollout after a changed setting; `name` is the run's index."""
    places = {(index, row.rollout) for index, run in enumerate(runs) for row in run.changes}
    return [
        {
            "type": "line",
            "name": str(index),
            "xref": f"x{axis}",
            "yref": f"y{axis} domain",
            "x0": rollout + 0.5,
            "x1": rollout + 0.5,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1.5, "dash": "dot"},
        }
        for index, rollout in sorted(places)
    ]


def _alarm_marks(runs: Sequence[Run], axis: str) -> list[dict[str, Any]]:
    """Return a short mark on the x axis at each rollout that raised an alarm; `name` is the run's index."""
    places = {(index, alarm.rollout) for index, run in enumerate(runs) for alarm in alarms_of(run)}
    return [
        {
            "type": "line",
            "name": str(index),
            "xref": f"x{axis}",
            "yref": f"y{axis} domain",
            "x0": rollout,
            "x1": rollout,
            "y0": 0.06 * index % 0.3,
            "y1": 0.06 * index % 0.3 + 0.05,
            "line": {"width": 4},
        }
        for index, rollout in sorted(places)
    ]


def _y_axis(panel: Panel, traces: Sequence[Trace], anchor: str, domain: tuple[float, float]) -> dict[str, Any]:
    values = [value for trace in traces for value in trace["y"] if value is not None]
    least = max(panel.least, panel.least_share * max(map(abs, values), default=0.0))
    return y_axis(values, anchor, domain, log=panel.log, bars=panel.bars, least=least)


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
    return {
        "type": "scatter",
        "name": f"{label}, interval",
        "meta": index,
        "mode": "lines",
        "x": low[0] + high[0][::-1],
        "y": low[1] + high[1][::-1],
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


def _rounded(values: Iterable[float]) -> list[float]:
    """Round to six digits: a smoothed curve has no more, and the page is smaller."""
    return [float(f"{value:.6g}") for value in values]


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
