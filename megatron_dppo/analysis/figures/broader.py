"""Figures 8 and later: scores and metrics over models, R3, divergences, tasks and thresholds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.paper_rules import Ratio
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import (
    MOST_BANDS,
    REWARD,
    CurvePanel,
    drawings_of,
    on_one_scale,
    one_figure,
    per_experiment,
    plain,
    score_notes,
    score_of_paper,
    scores,
    scores_or_reward,
    six,
)
from megatron_dppo.analysis.figures.material import AlgorithmLine, Experiment, Kind, Lacking, Material
from megatron_dppo.analysis.figures.style import relaxed

_NO_PAIR = Lacking(
    "no algorithm was trained with R3 and without it",
    'train one with rollout.routing_replay = "replay", and with "measure" or "off"',
)
_NO_TOPK = Lacking("no run has a Top-K trust region", "train dppo_topk_tv or dppo_topk_kl, too")
_SIDES = {False: "w/o R3", True: "w/ R3"}


def draw_overview(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw the right of Figure 1: a clipped ratio and DPPO, each without R3 and with it, in one panel."""
    experiments = [replace(e, lines=_overview(e.lines)) for e in material.experiments]
    if not (experiments := [e for e in experiments if e.lines]):
        return Lacking(
            "no experiment has a clipped ratio and DPPO, each with R3 and without it",
            'train grpo_clip_higher and dppo_binary_tv, with rollout.routing_replay = "replay" and without',
        )
    return per_experiment(
        kind,
        experiments,
        "GRPO and DPPO, without and with R3",
        lambda e: score_of_paper(e.lines) or plain(e.lines, REWARD),
        score_notes(experiments),
    )


def _overview(lines: Sequence[AlgorithmLine]) -> tuple[AlgorithmLine, ...]:
    """Return a clipped ratio and a divergence, each with and without R3, or nothing if one is missing.

    Binary-TV is the paper's divergence here, and comes before others.
    """
    both = [line.objective for line in lines if not line.is_replayed and _twin(line, lines)]
    clipped = [o for o in both if _is_plain_clip(o)]
    divergences = [o for o in both if o.rule == "divergence" and o.anchor == "rollout"]
    divergences.sort(key=lambda o: o.divergence != "binary_tv")
    if not clipped or not divergences:
        return ()
    return tuple(line for line in lines if line.objective in (clipped[0], divergences[0]))


def draw_replay(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 8: all algorithms in each panel, a panel for each score without R3 and with it.

    Top-K divergences are left out unless one was trained with R3: Figure 10 shows them.
    """
    experiments = [e for e in material.experiments if len({line.is_replayed for line in e.lines}) > 1]
    if not experiments:
        return _NO_PAIR
    experiments = [replace(e, lines=_of_replay(e.lines)) for e in experiments]

    def panels(experiment: Experiment) -> list[CurvePanel]:
        return [
            side
            for panel in scores_or_reward(experiment.lines)
            for side in on_one_scale([_of_side(panel, is_replayed=is_replayed) for is_replayed in _SIDES])
        ]

    return per_experiment(kind, experiments, "Routing replay (R3)", panels, score_notes(experiments), columns=4)


def _of_side(panel: CurvePanel, *, is_replayed: bool) -> CurvePanel:
    lines = [line for line in panel.lines if line.is_replayed == is_replayed]
    return replace(panel, title=f"{panel.title} {_SIDES[is_replayed]}", lines=lines)


def _of_replay(lines: Sequence[AlgorithmLine]) -> tuple[AlgorithmLine, ...]:
    has_topk = any(line.objective.needs_topk and line.is_replayed for line in lines)
    return tuple(line for line in lines if has_topk or not line.objective.needs_topk)


def draw_replay_by_algorithm(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw scores with R3 and without it, a panel for each algorithm and score: no figure of the paper."""
    experiments = [
        replace(e, lines=paired)
        for e in material.experiments
        if (paired := tuple(line for line in e.lines if _twin(line, e.lines)))
    ]
    if not experiments:
        return _NO_PAIR

    def panels(experiment: Experiment) -> list[CurvePanel]:
        algorithms = dict.fromkeys(line.objective for line in experiment.lines)
        of_each = [[line for line in experiment.lines if line.objective == own] for own in algorithms]
        return [
            side
            for panel in scores_or_reward(experiment.lines)
            for side in on_one_scale(
                [replace(panel, title=_title(panel.title, lines, of_each), lines=lines) for lines in of_each]
            )
        ]

    notes = score_notes(experiments)
    return per_experiment(kind, experiments, "Routing replay (R3), by algorithm", panels, notes, columns=4)


def _twin(line: AlgorithmLine, among: Sequence[AlgorithmLine]) -> bool:
    """Whether the same algorithm is there with R3, if this line is without, or the other way round."""
    return any(o.objective == line.objective and o.is_replayed != line.is_replayed for o in among)


def _title(title: str, lines: Sequence[AlgorithmLine], among: Sequence[Sequence[AlgorithmLine]]) -> str:
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
        for panel in scores_or_reward(experiment.lines)
    ]
    return one_figure(
        kind, material.experiments, "Models and settings", panels, score_notes(material.experiments)
    )


def draw_topk_scores(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 10: Top-K divergences, binary ones and the baselines."""
    experiments = _with_topk(material.experiments)
    notes = score_notes(experiments)
    title = "Binary and Top-K divergences"
    return (
        per_experiment(kind, experiments, title, lambda e: scores_or_reward(e.lines), notes)
        if experiments
        else _NO_TOPK
    )


def draw_topk_metrics(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 16: the six metrics of the same runs."""
    experiments = _with_topk(material.experiments)
    title = "Binary and Top-K divergences, all metrics"
    return per_experiment(kind, experiments, title, six) if experiments else _NO_TOPK


def _with_topk(experiments: Iterable[Experiment]) -> list[Experiment]:
    having = [e for e in experiments if any(line.objective.needs_topk for line in e.lines)]
    return [replace(e, lines=tuple(x for x in e.lines if x.objective.anchor == "rollout")) for e in having]


def draw_metrics(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figures 11 to 15: reward, scores, mismatch, length and entropy of an experiment's algorithms.

    Lines with R3 and without it share a figure if they are few. Top-K divergences are left out if there are
    others: Figure 16 has the same panels with them.
    """
    known = [replace(e, lines=_without_topk(e.lines)) for e in material.experiments]
    few = [e for e in known if len(e.lines) <= MOST_BANDS]
    split = few + [
        replace(e, label=", ".join(filter(None, [e.label, words])), lines=lines)
        for e in known
        if e not in few
        for words, is_replayed in (("", False), ("with R3", True))
        if (lines := tuple(x for x in e.lines if x.is_replayed == is_replayed))
    ]
    return per_experiment(kind, split, "Evolution of metrics", six)


def _without_topk(lines: tuple[AlgorithmLine, ...]) -> tuple[AlgorithmLine, ...]:
    return tuple(line for line in lines if not line.objective.needs_topk) or lines


def draw_tasks(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 17: PPO's clip against DPPO-Binary-TV on several tasks and models.

    The clip is the paper's symmetric one. Where no experiment has it, any other takes its place.
    """
    both = [replace(e, lines=tuple(filter(_is_clip_or_binary_tv, e.lines))) for e in material.experiments]
    kept = [e for e in both if _has_clip(e, is_symmetric=True)] or [e for e in both if _has_clip(e)]
    if not kept:
        return Lacking(
            "no experiment has both a clipped ratio and Binary-TV",
            "train grpo (or grpo_clip_higher) and dppo_binary_tv with the same settings",
        )
    panels = [CurvePanel(e.label or "reward", "reward/mean", e.lines) for e in kept]
    notes = ["The panels are training rewards: PPO's clip of the ratio and the Binary-TV trust region."]
    lines = [line for experiment in kept for line in experiment.lines]
    sides = [
        " and ".join(dict.fromkeys(line.label for line in lines if line.objective.rule == rule))
        for rule in ("ratio", "divergence")
    ]
    return one_figure(kind, kept, f"Training reward of {' against '.join(sides)}", panels, notes, columns=4)


def _has_clip(experiment: Experiment, *, is_symmetric: bool = False) -> bool:
    """Whether some lines clip the ratio and some do not; with `is_symmetric`, one clip must be symmetric."""
    of_clip = [own for line in experiment.lines if isinstance(own := line.objective, Ratio)]
    is_there = any(own.eps_low == own.eps_high or not is_symmetric for own in of_clip)
    return is_there and len(of_clip) < len(experiment.lines)


def _is_plain_clip(own: Objective) -> bool:
    return own.rule == "ratio" and relaxed(own) == "none" and own.anchor == "rollout"


def _is_clip_or_binary_tv(line: AlgorithmLine) -> bool:
    own = line.objective
    is_tv = own.rule == "divergence" and own.divergence == "binary_tv" and own.anchor == "rollout"
    return (_is_plain_clip(own) or is_tv) and not line.is_replayed


def draw_sensitivity(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 19 of the third version: one algorithm with several thresholds."""
    drawings: list[Drawing] = []
    for experiment in material.experiments:
        families: dict[tuple[object, ...], list[AlgorithmLine]] = {}
        for line in experiment.lines:
            own = line.objective
            if own.rule in ("ratio", "divergence", "own") and relaxed(own) == "none":
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


def _thresholds(line: AlgorithmLine) -> tuple[object, ...]:
    own = line.objective
    numbers = ((name, getattr(own, name)) for name, known in own.numbers.items() if known.is_main)
    return (*numbers, *own.rule_options.items())


def _family(lines: Sequence[AlgorithmLine]) -> str:
    return lines[0].label.partition(",")[0]
