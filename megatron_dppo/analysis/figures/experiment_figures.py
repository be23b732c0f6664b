"""Draws figures whose panels are curves over training: one for each experiment, or one of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import CurvePanel, curve_panels, reading_said, seeds_said
from megatron_dppo.analysis.figures.material import Kind, Lacking, scores_of
from megatron_dppo.analysis.figures.runs import SCORE, Experiment, Line

REWARD = ("reward", "reward/mean")
MISMATCH = ("mean |π − μ|", "mismatch/abs_prob_diff_mean")
EXTREMES = ("max and min of π − μ", "mismatch/prob_diff_max", "mismatch/prob_diff_min")
ENTROPY = ("entropy, nats", "policy/entropy")
LENGTH = ("response length, tokens", "rollout/response_length_mean")
_OF_PAPER = re.compile(r"aime[-_ ]?(20)?24", re.IGNORECASE)  # the set of Figures 1 and 3
_FIRST_STEP = (
    "mean |π − μ| is measured on a rollout's first mini-batch, before its gradient step: both engines have the "
    "same weights."
)
_NO_SCORES = (
    "No evaluation set was evaluated (evaluation.sets): the panels are training rewards instead of scores."
)
NOTHING_YET = Lacking("the runs have no finished rollout with these metrics", "let them run on")


def plain(lines: Sequence[Line], *named: tuple[str, str]) -> list[CurvePanel]:
    """Return a panel for each title and metric."""
    return [CurvePanel(title, metric, lines) for title, metric in named]


def scores(lines: Sequence[Line]) -> list[CurvePanel]:
    """Return one panel for each evaluation set; not smoothed, as in the paper."""
    found: list[CurvePanel] = []
    for metric in scores_of(lines):
        match = SCORE.fullmatch(metric)
        assert match is not None, "scores_of gives names of scores"
        found.append(CurvePanel(f"{match[1]}, avg@{match[2]}", metric, lines, can_be_smoothed=False))
    return found


def score_of_paper(lines: Sequence[Line]) -> list[CurvePanel]:
    """Return the panel of AIME24, the one score of Figures 1 and 3; all scores without such a set."""
    all_scores = scores(lines)
    return [panel for panel in all_scores if _OF_PAPER.search(panel.metric)][:1] or all_scores


def extremes(lines: Sequence[Line]) -> CurvePanel:
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


def narrowed(
    experiments: Iterable[Experiment], keeps: Callable[[Line], bool], shows: Callable[[Line], bool]
) -> list[Experiment]:
    """Return the experiments that have a line that `shows`, with no other lines than those that `keeps`."""
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
    caption = [*notes, *reading_said(panels)]
    if any(panel.metric == MISMATCH[1] for panel in panels):
        caption.append(_FIRST_STEP)
    for experiment in experiments:
        if experiment.settings:
            caption.append(f"Settings of {experiment.label}: {experiment.settings}.")
        caption += seeds_said(experiment.lines)
    lines = [line for experiment in experiments for line in experiment.lines]
    runs = tuple(name for line in lines for name in (*(run.name for run in line.runs), *line.left_out))
    return [Drawing(kind.name, kind.paper, title, drawn, caption, columns, runs=runs)]
