"""Curves over rollouts: the mean of a line's seeds, its 95 % interval, the raw mean behind a smoothed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from megatron_dppo.analysis.contrasts import NUM_RESAMPLES
from megatron_dppo.analysis.figures.runs import Line
from megatron_dppo.analysis.figures.style import look, plain_log_ticks
from megatron_dppo.analysis.report.smoothing import MIN_POINTS, smoothed
from megatron_dppo.analysis.report.text import changes_of

Floats = np.ndarray
_PERCENTS = (2.5, 97.5)
_SEED = 0
_MARGIN = 0.05  # of the values' range
_FEW_POINTS = 15  # of which each one is marked
_LEAST_RANGE = 0.1  # of the largest value: noise does not fill an axis
_LOG_TICKS, _MOST_LOG_TICKS = (1.0, 2.0, 5.0), 12  # less than a decade has labels, too
_LEVEL_COLOUR = "#cc0000"
MOST_BANDS = 4  # in a panel; of more, the interval of the last rollout alone is drawn


@dataclass(frozen=True)
class Curve:
    """Values of a line, [P] each, without an interval if there is a single seed."""

    x: Floats  # rollouts
    raw: Floats  # mean over seeds
    mean: Floats  # mean of the smoothed curves if the panel is smoothed
    low: Floats | None
    high: Floats | None
    num_seeds: int
    is_smoothed: bool


@dataclass(frozen=True)
class CurvePanel:
    """One pair of axes: a metric of some lines."""

    title: str
    metric: str
    lines: Sequence[Line]
    can_be_smoothed: bool = True
    factor: float = 1.0
    y_range: tuple[float, float] | None = None  # none: its own
    also: tuple[str, ...] = ()  # further metrics of the same lines, in the same looks
    level: tuple[float, str] | None = None  # a horizontal line, and its entry in the legend
    is_logarithmic: bool = False  # the y axis

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics that it draws."""
        return (self.metric, *self.also)


def curve_of(line: Line, panel: CurvePanel, metric: str = "") -> Curve | None:
    """Return the line's curve over the rollouts that all its seeds have; none if no seed has the metric.

    Args:
        line: Line of the panel.
        panel: Says how the values are scaled and smoothed.
        metric: One of the panel's; the first by default.
    """
    metric = metric or panel.metric
    known = [run.curves[metric] for run in line.runs if metric in run.curves]
    if not known:
        return None
    shared = sorted(set.intersection(*(set(x) for x, _ in known)))
    if not shared:
        return None
    by_rollout = [dict(zip(x, y, strict=True)) for x, y in known]
    values = panel.factor * np.asarray([[of[x] for x in shared] for of in by_rollout], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan  # a gap
    is_smoothed = panel.can_be_smoothed and len(shared) >= MIN_POINTS
    log = panel.is_logarithmic and bool((values > 0).all())
    seen = np.asarray([smoothed(row.tolist(), shared, log=log) for row in values]) if is_smoothed else values
    low, high = mean_intervals(seen) if len(known) > 1 else (None, None)
    x = np.asarray(shared)
    return Curve(x, values.mean(axis=0), seen.mean(axis=0), low, high, len(known), is_smoothed)


def mean_intervals(values: Floats) -> tuple[Floats, Floats]:
    """Return [P] bounds of the means of values [S, P] over seeds: `contrasts.estimate`'s at each point."""
    num_seeds = len(values)
    chosen = np.random.default_rng(_SEED).integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    shares = np.stack([(chosen == seed).mean(axis=1) for seed in range(num_seeds)], axis=1)
    low, high = np.percentile(shares @ values, _PERCENTS, axis=0)
    return low, high


def curve_panels(panels: Sequence[CurvePanel]) -> list[Callable[[Axes], None]]:
    """Return the functions that draw the panels, without panels for which no line has a value."""
    made = [(panel, _curves(panel)) for panel in panels]
    return [_drawer(panel, curves) for panel, curves in made if curves]


def _curves(panel: CurvePanel) -> list[tuple[Line, str, Curve]]:
    """Return the panel's curves with their lines and metrics, a line's metrics one after the other."""
    return [
        (line, metric, curve)
        for line in panel.lines
        for metric in panel.metrics
        if (curve := curve_of(line, panel, metric)) is not None
    ]


def on_one_scale(panels: Sequence[CurvePanel]) -> list[CurvePanel]:
    """Return the same panels with one y axis, so that neighbours can be compared."""
    curves = [curve for panel in panels for _, _, curve in _curves(panel)]
    shown = [part for c in curves for part in (c.raw, c.mean, c.low, c.high) if part is not None]
    known = np.concatenate([part[np.isfinite(part)] for part in shown]) if shown else np.zeros(0)
    if not known.size:
        return list(panels)
    margin = _MARGIN * (known.max() - known.min()) or _MARGIN
    y_range = (float(known.min() - margin), float(known.max() + margin))
    return [replace(panel, y_range=y_range) for panel in panels]


def _drawer(panel: CurvePanel, curves: Sequence[tuple[Line, str, Curve]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        num_bands = sum(curve.low is not None for _, _, curve in curves)
        sides = {(line.objective, line.is_replayed) for line, _, _ in curves}
        is_of_one = len({objective for objective, _ in sides}) == 1 < len(sides)
        labelled: set[str] = set()
        for place, (line, metric, curve) in enumerate(curves):
            own = look(
                line.objective,
                line.shade,
                is_replayed=line.is_replayed,
                is_alone=is_of_one,
                own_place=line.own_place,
            )
            named = {"gid": metric} if line.label in labelled else {"label": line.label}
            labelled.add(line.label)
            _draw_curve(axes, curve, {**own, **named}, has_band=num_bands <= MOST_BANDS)
            if num_bands > MOST_BANDS:
                _draw_last_interval(axes, curve, own, place)
        if panel.level is not None:
            value, label = panel.level
            axes.axhline(value, color=_LEVEL_COLOUR, linestyle="--", linewidth=1, label=label, gid="level")
        axes.set_title(panel.title)
        axes.set_xlabel("rollout")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.margins(x=0.02)
        if panel.is_logarithmic and all((curve.raw > 0).all() for _, _, curve in curves):
            axes.set_yscale("log")
            plain_log_ticks(axes.yaxis)
            axes.yaxis.set_major_locator(LogLocator(subs=_LOG_TICKS, numticks=_MOST_LOG_TICKS))
            return
        if panel.y_range is not None:
            axes.set_ylim(*panel.y_range)
            return
        low, high = axes.get_ylim()
        if high - low < (least := _LEAST_RANGE * max(abs(low), abs(high))):
            axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)

    return draw


def _draw_curve(axes: Axes, curve: Curve, own: Mapping[str, Any], *, has_band: bool) -> None:
    if curve.is_smoothed:
        axes.plot(curve.x, curve.raw, color=own["color"], linewidth=0.6, alpha=0.25, gid="raw")
    if has_band and curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=own["color"], alpha=0.15, linewidth=0)
    marker = "o" if curve.x.size <= _FEW_POINTS and not curve.is_smoothed else ""
    axes.plot(curve.x, curve.mean, marker=marker, **own)


def _draw_last_interval(axes: Axes, curve: Curve, own: Mapping[str, Any], place: int) -> None:
    """Draw the interval of the last rollout right of it, a column for each line."""
    if curve.low is None or curve.high is None:
        return
    x = curve.x[-1] + 0.02 * (1 + place) * max(np.ptp(curve.x), 1)
    axes.plot([x, x], [curve.low[-1], curve.high[-1]], color=own["color"], linewidth=2, gid="interval")


def _num_bands(panel: CurvePanel) -> int:
    return sum(curve.low is not None for _, _, curve in _curves(panel))


def seeds_said(lines: Sequence[Line]) -> list[str]:
    """Return a caption's sentences on each line: its runs and their seeds."""
    found: list[str] = []
    for line in lines:
        seeds = ", ".join(run.seed for run in line.runs)
        names = ", ".join(run.name for run in line.runs)
        noun = "seed" if len(line.runs) == 1 else "seeds"
        found.append(f"{line.label}: {noun} {seeds} (runs: {names}).")
        if line.left_out:
            left_out = ", ".join(line.left_out)
            found.append(f"Left out, for a later run has the same settings and seed: {left_out}.")
        for run in line.runs:
            if run.run.changes:
                changes = "; ".join(changes_of(run.run))
                found.append(f"{run.name} stands under its last settings; some were changed {changes}.")
    return found


def _lacking(panels: Sequence[CurvePanel]) -> Iterator[str]:
    """Yield a sentence for each panel that lacks the metric of a line, or of some of its seeds."""
    for panel in panels:
        without: list[str] = []
        for line in panel.lines:
            names = [run.name for run in line.runs if not all(m in run.curves for m in panel.metrics)]
            if names:
                which = "" if len(names) == len(line.runs) else f" ({', '.join(names)})"
                without.append(f"{line.label}{which}")
        if without and _curves(panel):
            yield f"Without {panel.title}, which was not measured: {', '.join(without)}."


def reading_said(panels: Sequence[CurvePanel]) -> list[str]:
    """Return a caption's sentences on means, intervals and smoothing in these panels."""
    curves = [(panel, curve) for panel in panels for _, _, curve in _curves(panel)]
    said: list[str] = [*_lacking(panels)]
    if any(curve.num_seeds > 1 for _, curve in curves):
        said.append(
            "Lines are means over seeds, to the last rollout that all of a line's seeds have; "
            "shades are 95 % bootstrap intervals of the mean."
        )
    if any(_num_bands(panel) > MOST_BANDS for panel in panels):
        said.append(
            f"Of more than {MOST_BANDS} curves the interval of the last rollout alone is drawn, to the right."
        )
    if any(curve.num_seeds == 1 for _, curve in curves):
        said.append("A line without a shade is a single seed: its distance from another may be chance.")
    names = dict.fromkeys(panel.title for panel, curve in curves if curve.is_smoothed)
    plain = dict.fromkeys(panel.title for panel, curve in curves if not curve.is_smoothed)
    if names:
        said.append(
            f"Smoothed by a local line (Gaussian of 2 points), the raw mean behind: {'; '.join(names)}. "
            "The paper's Gaussian filter is a plain average, which bends a curve's ends towards its middle."
        )
    if plain:
        said.append(f"Not smoothed: {'; '.join(plain)}.")
    return said
