"""Draws curves over training: means of a line's seeds, 95 % intervals, and raw means behind smoothed ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import SCORE, AlgorithmLine, Experiment, Kind, Lacking, scores_of
from megatron_dppo.analysis.figures.style import look, plain_log_ticks
from megatron_dppo.analysis.lines import Curve, can_be_logarithmic, curve_of
from megatron_dppo.analysis.report.text import changes_of

_MARGIN = 0.05  # of the values' range
_FEW_POINTS = 15  # of which each one is marked
_LEAST_RANGE = 0.1  # of the largest value: noise does not fill an axis
_LOG_TICKS, _MOST_LOG_TICKS = (1.0, 2.0, 5.0), 12  # less than a decade has labels, too
_LEVEL_COLOUR = "#cc0000"
MOST_BANDS = 4  # in a panel; with more curves, only the interval of the last rollout is drawn
_OF_PAPER = re.compile(r"aime[-_ ]?(20)?24", re.IGNORECASE)  # the set of Figures 1 and 3
_FIRST_STEP = (
    "mean |π − μ| is measured on a rollout's first mini-batch, before its gradient step: both engines have the "
    "same weights."
)
_NO_SCORES = (
    "No evaluation set was evaluated (evaluation.sets): the panels are training rewards instead of scores."
)
NOTHING_YET = Lacking("the runs have no finished rollout with these metrics", "let them run on")
REWARD = ("reward", "reward/mean")
MISMATCH = ("mean |π − μ|", "mismatch/abs_prob_diff_mean")
EXTREMES = ("max and min of π − μ", "mismatch/prob_diff_max", "mismatch/prob_diff_min")
ENTROPY = ("entropy, nats", "policy/entropy")
LENGTH = ("response length, tokens", "rollout/response_length_mean")

LineCurve = tuple[AlgorithmLine, str, Curve]
"""A line, the metric, and its curve."""


@dataclass(frozen=True)
class CurvePanel:
    """One pair of axes: a metric of some lines."""

    title: str
    metric: str
    lines: Sequence[AlgorithmLine]
    factor: float = 1.0
    y_range: tuple[float, float] | None = None  # None: its own
    also: tuple[str, ...] = ()  # further metrics of the same lines, in the same looks
    level: tuple[float, str] | None = None  # a horizontal line, and its entry in the legend
    is_logarithmic: bool = False  # the y axis, if it can show every value

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics that it draws."""
        return (self.metric, *self.also)

    @cached_property
    def has_log_axis(self) -> bool:
        """Whether the y axis is logarithmic."""
        return self.is_logarithmic and can_be_logarithmic(
            value for line in self.lines for name in self.metrics for x, y in line.points(name) for value in y
        )

    @cached_property
    def curves(self) -> list[LineCurve]:
        """Curves of the lines that have a metric of the panel, a line's metrics one after the other."""
        found: list[LineCurve] = []
        for line in self.lines:
            for metric in self.metrics:
                seeds = [(x, [self.factor * value for value in y]) for x, y in line.points(metric)]
                if (curve := curve_of(seeds, metric, is_log=self.has_log_axis)) is not None:
                    found.append((line, metric, curve))
        return found

    @property
    def num_bands(self) -> int:
        """Number of curves that have an interval."""
        return sum(curve.low is not None for _, _, curve in self.curves)


def curve_panels(panels: Sequence[CurvePanel]) -> list[Callable[[Axes], None]]:
    """Return the functions that draw the panels, without panels for which no line has a value."""
    return [partial(_draw_panel, panel) for panel in panels if panel.curves]


def on_one_scale(panels: Sequence[CurvePanel]) -> list[CurvePanel]:
    """Return the same panels with one y axis, so that neighbours can be compared."""
    curves = [curve for panel in panels for _, _, curve in panel.curves]
    shown = [part for c in curves for part in (c.raw, c.mean, c.low, c.high) if part is not None]
    known = np.concatenate([part[np.isfinite(part)] for part in shown]) if shown else np.zeros(0)
    if not known.size:
        return list(panels)
    margin = _MARGIN * (known.max() - known.min()) or _MARGIN
    y_range = (float(known.min() - margin), float(known.max() + margin))
    return [replace(panel, y_range=y_range) for panel in panels]


def _draw_panel(panel: CurvePanel, axes: Axes) -> None:
    sides = {(line.objective, line.is_replayed) for line, _, _ in panel.curves}
    is_alone = len({objective for objective, _ in sides}) == 1 < len(sides)
    labelled: set[str] = set()
    for place, (line, metric, curve) in enumerate(panel.curves):
        own = look(
            line.objective,
            line.shade,
            is_replayed=line.is_replayed,
            is_alone=is_alone,
            own_place=line.own_place,
        )
        named = {"gid": metric} if line.label in labelled else {"label": line.label}
        labelled.add(line.label)
        _draw_curve(axes, curve, {**own, **named}, has_band=panel.num_bands <= MOST_BANDS)
        if panel.num_bands > MOST_BANDS:
            _draw_last_interval(axes, curve, own, place)
    if panel.level is not None:
        value, label = panel.level
        axes.axhline(value, color=_LEVEL_COLOUR, linestyle="--", linewidth=1, label=label, gid="level")
    axes.set_title(panel.title)
    axes.set_xlabel("rollout")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.margins(x=0.02)
    if panel.has_log_axis:
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
        axes.yaxis.set_major_locator(LogLocator(subs=_LOG_TICKS, numticks=_MOST_LOG_TICKS))
    elif panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    else:
        low, high = axes.get_ylim()
        if high - low < (least := _LEAST_RANGE * max(abs(low), abs(high))):
            axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)


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


def describe_seeds(lines: Sequence[AlgorithmLine]) -> list[str]:
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
    """Yield a sentence for each panel that lacks the metric for a line or some seeds."""
    for panel in panels:
        without: list[str] = []
        for line in panel.lines:
            names = [run.name for run in line.runs if not all(m in run.curves for m in panel.metrics)]
            if names:
                which = "" if len(names) == len(line.runs) else f" ({', '.join(names)})"
                without.append(f"{line.label}{which}")
        if without and panel.curves:
            yield f"Without {panel.title}, which was not measured: {', '.join(without)}."


def describe_reading(panels: Sequence[CurvePanel]) -> list[str]:
    """Return a caption's sentences on means, intervals and smoothing in these panels."""
    curves = [(panel, curve) for panel in panels for _, _, curve in panel.curves]
    said: list[str] = [*_lacking(panels)]
    if any(curve.num_seeds > 1 for _, curve in curves):
        said.append(
            "Lines are means over seeds, to the last rollout that all of a line's seeds have; "
            "shades are 95 % bootstrap intervals of the mean."
        )
    if any(panel.num_bands > MOST_BANDS for panel in panels):
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


def plain(lines: Sequence[AlgorithmLine], *named: tuple[str, str]) -> list[CurvePanel]:
    """Return a panel for each title and metric."""
    return [CurvePanel(title, metric, lines) for title, metric in named]


def scores(lines: Sequence[AlgorithmLine]) -> list[CurvePanel]:
    """Return one panel for each evaluation set; not smoothed, as in the paper."""
    found: list[CurvePanel] = []
    for metric in scores_of(lines):
        match = SCORE.fullmatch(metric)
        assert match is not None, "scores_of gives names of scores"
        found.append(CurvePanel(f"{match[1]}, avg@{match[2]}", metric, lines))
    return found


def scores_or_reward(lines: Sequence[AlgorithmLine]) -> list[CurvePanel]:
    """Return the panels of the scores, or of the reward if nothing was evaluated."""
    return scores(lines) or plain(lines, REWARD)


def score_of_paper(lines: Sequence[AlgorithmLine]) -> list[CurvePanel]:
    """Return the panel of AIME24, the one score of Figures 1 and 3; all scores without such a set."""
    all_scores = scores(lines)
    return [panel for panel in all_scores if _OF_PAPER.search(panel.metric)][:1] or all_scores


def extremes(lines: Sequence[AlgorithmLine]) -> CurvePanel:
    """Return the panel of the largest and the smallest π − μ, two curves to a line, about zero."""
    title, largest, smallest = EXTREMES
    return CurvePanel(title, largest, lines, also=(smallest,), level=(0.0, "no mismatch (π = μ)"))


def score_notes(experiments: Iterable[Experiment]) -> list[str]:
    """Return a caption's note where rewards take the place of scores."""
    return [] if scores_of([line for e in experiments for line in e.lines]) else [_NO_SCORES]


def six(experiment: Experiment) -> list[CurvePanel]:
    """Return the panels of reward, scores, mismatch, length and entropy: Appendix G's six with two sets."""
    lines = experiment.lines
    return [*plain(lines, REWARD), *scores(lines), *plain(lines, MISMATCH, LENGTH, ENTROPY)]


def keep_lines(
    experiments: Iterable[Experiment],
    keeps: Callable[[AlgorithmLine], bool],
    shows: Callable[[AlgorithmLine], bool],
) -> list[Experiment]:
    """Return the experiments with a line that `shows`, reduced to the lines that `keeps`."""
    kept = [replace(each, lines=tuple(filter(keeps, each.lines))) for each in experiments]
    return [each for each in kept if any(map(shows, each.lines))]


def per_experiment(
    kind: Kind,
    experiments: Sequence[Experiment],
    title: str,
    panels_of: Callable[[Experiment], Sequence[CurvePanel]],
    notes: Sequence[str] = (),
    columns: int = 3,
) -> list[Drawing] | Lacking:
    """Return a figure for each experiment that has a curve."""
    drawings = [
        drawing
        for experiment in experiments
        for drawing in drawings_of(kind, experiment, title, panels_of(experiment), notes, columns)
    ]
    return drawings or NOTHING_YET


def drawings_of(
    kind: Kind,
    experiment: Experiment,
    title: str,
    panels: Sequence[CurvePanel],
    notes: Sequence[str],
    columns: int = 3,
) -> list[Drawing]:
    """Return one figure of one experiment, or `None` if no panel has a curve."""
    suffix = "_" + re.sub(r"[^a-z0-9.]+", "_", experiment.label.lower()).strip("_") if experiment.label else ""
    named = replace(kind, name=kind.name + suffix)
    whole = f"{title}: {experiment.label}" if experiment.label else title
    made = one_figure(named, [experiment], whole, panels, notes, columns)
    return made if isinstance(made, list) else []


def one_figure(
    kind: Kind,
    experiments: Sequence[Experiment],
    title: str,
    panels: Sequence[CurvePanel],
    notes: Sequence[str],
    columns: int = 3,
) -> list[Drawing] | Lacking:
    """Return one figure of several experiments, with the runs, seeds and smoothing in its caption."""
    drawn = curve_panels(panels)
    if not drawn:
        return NOTHING_YET
    caption = [*notes, *describe_reading(panels)]
    if any(panel.metric == MISMATCH[1] for panel in panels):
        caption.append(_FIRST_STEP)
    for experiment in experiments:
        if experiment.settings:
            caption.append(f"Settings of {experiment.label}: {experiment.settings}.")
        caption += describe_seeds(experiment.lines)
    lines = [line for experiment in experiments for line in experiment.lines]
    runs = tuple(name for line in lines for name in (*(run.name for run in line.runs), *line.left_out))
    return [Drawing(kind.name, kind.paper, title, drawn, caption, columns, runs=runs)]
