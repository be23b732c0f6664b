"""Figures 8 and later: scores and metrics over models, R3, divergences, tasks and thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import MOST_BANDS, CurvePanel, on_one_scale
from megatron_dppo.analysis.figures.experiment_figures import (
    REWARD,
    drawings_of,
    one_figure,
    per_experiment,
    plain,
    score_notes,
    scores,
    six,
)
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.runs import Experiment, Line


def draw_replay(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 8 (and the right of Figure 1): scores with and without R3, a panel for each algorithm."""
    experiments = [e for e in material.experiments if _has_both(e)]
    if not experiments:
        return Lacking(
            "no two runs differ in R3",
            'train with rollout.routing_replay = "replay", and with "measure" or "off"',
        )

    def panels(experiment: Experiment) -> list[CurvePanel]:
        algorithms = dict.fromkeys(line.objective for line in experiment.lines)
        of_each = [[line for line in experiment.lines if line.objective == own] for own in algorithms]
        both = [lines for lines in of_each if len({line.is_replayed for line in lines}) > 1]
        return [
            side
            for panel in scores(experiment.lines) or plain(experiment.lines, REWARD)
            for side in on_one_scale(
                [replace(panel, title=_title(panel.title, lines, both), lines=lines) for lines in both]
            )
        ]

    notes = score_notes(experiments)
    return per_experiment(kind, experiments, "Routing replay (R3)", panels, notes, columns=4)


def _has_both(experiment: Experiment) -> bool:
    """Whether some algorithm was trained with R3 and without."""
    sides = {(line.objective, line.is_replayed) for line in experiment.lines}
    return any((objective, not is_replayed) in sides for objective, is_replayed in sides)


def _title(title: str, lines: Sequence[Line], among: Sequence[Sequence[Line]]) -> str:
    return title if len(among) == 1 else f"{title}, {lines[0].label.removesuffix(' + R3')}"


def draw_models(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 9: the same scores of several models, or settings."""
    if len(material.experiments) < 2:
        return Lacking(
            "the runs differ in no model and no other setting",
            "name runs of another model or setting, too",
        )
    panels = [
        replace(panel, title=f"{panel.title}, {experiment.label}")
        for experiment in material.experiments
        for panel in scores(experiment.lines) or plain(experiment.lines, REWARD)
    ]
    return one_figure(
        kind, material.experiments, "Models and settings", panels, score_notes(material.experiments)
    )


def draw_topk_scores(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 10: Top-K divergences beside binary ones and the baselines."""
    experiments = _with_topk(material.experiments)
    if not experiments:
        return Lacking("no run has a Top-K trust region", "train dppo_topk_tv or dppo_topk_kl, too")
    return per_experiment(
        kind,
        experiments,
        "Binary and Top-K divergences",
        lambda e: scores(e.lines) or plain(e.lines, REWARD),
        score_notes(experiments),
    )


def draw_topk_metrics(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 16: the six metrics of the same runs."""
    experiments = _with_topk(material.experiments)
    if not experiments:
        return Lacking("no run has a Top-K trust region", "train dppo_topk_tv or dppo_topk_kl, too")
    return per_experiment(kind, experiments, "Binary and Top-K divergences, all metrics", six)


def _with_topk(experiments: Iterable[Experiment]) -> list[Experiment]:
    having = [e for e in experiments if any(line.objective.needs_topk for line in e.lines)]
    return [replace(e, lines=tuple(x for x in e.lines if x.objective.anchor == "rollout")) for e in having]


def draw_metrics(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figures 11 to 15: reward, scores, mismatch, length and entropy of an experiment's algorithms.

    Lines with and without R3 stand together where they are few, else in a figure each.
    """
    few = [e for e in material.experiments if len(e.lines) <= MOST_BANDS]
    split = few + [
        replace(e, label=", ".join(filter(None, [e.label, words])), lines=lines)
        for e in material.experiments
        if e not in few
        for words, is_replayed in (("", False), ("with R3", True))
        if (lines := tuple(x for x in e.lines if x.is_replayed == is_replayed))
    ]
    return per_experiment(kind, split, "Evolution of metrics", six)


def draw_tasks(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 17: PPO's clip against DPPO-Binary-TV on several tasks and models."""
    kept = [replace(e, lines=tuple(filter(_is_clip_or_binary_tv, e.lines))) for e in material.experiments]
    kept = [e for e in kept if {line.objective.rule for line in e.lines} == {"ratio", "divergence"}]
    if not kept:
        return Lacking(
            "no experiment has both a clipped ratio and Binary-TV",
            "train grpo (or grpo_clip_higher) and dppo_binary_tv with the same settings",
        )
    panels = [CurvePanel(e.label or "reward", "reward/mean", e.lines) for e in kept]
    notes = ["The panels are training rewards: PPO's clip of the ratio beside the trust region by Binary-TV."]
    lines = [line for experiment in kept for line in experiment.lines]
    sides = [
        " and ".join(dict.fromkeys(line.label for line in lines if line.objective.rule == rule))
        for rule in ("ratio", "divergence")
    ]
    return one_figure(kind, kept, f"Training reward of {' against '.join(sides)}", panels, notes, columns=4)


def _is_clip_or_binary_tv(line: Line) -> bool:
    own = line.objective
    is_clip = own.rule == "ratio" and own.relax == "none"
    is_tv = own.rule == "divergence" and own.divergence == "binary_tv"
    return (is_clip or is_tv) and own.anchor == "rollout" and not line.is_replayed


def draw_sensitivity(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 19 of the third version: one algorithm with several thresholds."""
    drawings: list[Drawing] = []
    for experiment in material.experiments:
        families: dict[tuple[object, ...], list[Line]] = {}
        for line in experiment.lines:
            own = line.objective
            if own.rule in ("ratio", "divergence", "own") and own.relax == "none":
                name = own.name if own.own is not None else ""
                family = (own.rule, name, own.divergence, own.anchor, line.is_replayed)
                families.setdefault(family, []).append(line)
        swept = [lines for lines in families.values() if len({_thresholds(line) for line in lines}) > 1]
        panels = [
            panel
            for lines in swept
            for panel in scores(lines) or [CurvePanel(f"reward ({_family(lines)})", "reward/mean", lines)]
        ]
        of_swept = replace(experiment, lines=tuple(line for lines in swept for line in lines))
        if swept:
            notes = score_notes([of_swept])
            drawings += drawings_of(kind, of_swept, "Thresholds", panels, notes)
    return drawings or Lacking(
        "no two runs differ in a threshold alone", "train with several algorithm.delta, or algorithm.eps_high"
    )


def _thresholds(line: Line) -> tuple[object, ...]:
    own = line.objective
    return (own.delta_low, own.delta_high, own.eps_low, own.eps_high, *own.rule_options.items())


def _family(lines: Sequence[Line]) -> str:
    return lines[0].label.partition(",")[0]
