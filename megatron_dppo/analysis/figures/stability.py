"""Draws Figures 3 to 7: training stability, and the clip relaxed for tokens that mu finds unlikely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_dppo.algorithms import Objective
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import CurvePanel
from megatron_dppo.analysis.figures.experiment_figures import (
    ENTROPY,
    LARGEST,
    MISMATCH,
    REWARD,
    narrowed,
    per_experiment,
    plain,
    scores,
)
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material, has
from megatron_dppo.analysis.figures.runs import Experiment, Line

_SIGN_LOST = (
    "The largest difference stands for the paper's signed maximum and minimum, which runs do not record."
)


def draw_stability(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 3: mismatch, reward and scores of all algorithms."""

    def panels(experiment: Experiment) -> list[CurvePanel]:
        lines = experiment.lines
        return [*plain(lines, MISMATCH, LARGEST, REWARD), *scores(lines)]

    return per_experiment(kind, material.experiments, "Stability", panels, [_SIGN_LOST])


def draw_anchor(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 4: trust regions that differ in their anchor alone."""
    pairs = [replace(e, lines=_by_anchor(e.lines)) for e in material.experiments]
    if not (pairs := [experiment for experiment in pairs if experiment.lines]):
        return Lacking(
            "no two runs have the same trust region around the rollout's and around recomputed log-probs",
            "train dppo_binary_kl and dppo_binary_kl_decoupled, or grpo_clip_higher and minirl",
        )
    return per_experiment(
        kind, pairs, "The anchor of the trust region", lambda e: plain(e.lines, REWARD, MISMATCH)
    )


def _by_anchor(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines that have a twin with the other anchor."""

    def without_anchor(objective: Objective) -> Objective:
        return replace(objective, name="", anchor="rollout")

    anchors: dict[tuple[Objective, bool], set[str]] = {}
    for line in lines:
        if line.objective.rule != "none":
            key = (without_anchor(line.objective), line.is_replayed)
            anchors.setdefault(key, set()).add(line.objective.anchor)
    return tuple(
        line for line in lines if len(anchors.get((without_anchor(line.objective), line.is_replayed), ())) > 1
    )


def draw_bad_updates(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 5: reward, and how many updates push a negative token down by half or more."""
    notes = [
        "Bad updates: tokens with A < 0 and mu - pi of at least 0.5, of all learning tokens; masked ones count."
    ]
    experiments = narrowed(
        material.experiments, _is_minimal_or_unmasked, lambda line: line.objective.rule == "negative"
    )
    if not experiments:
        experiments = material.experiments
        notes.append(
            "The paper's minimal masks (negative_mask) are not among these runs: all algorithms are shown."
        )

    def panels(experiment: Experiment) -> list[CurvePanel]:
        bad = CurvePanel("bad updates, %", "trust_region/bad_update_fraction", experiment.lines, factor=100.0)
        return [*plain(experiment.lines, REWARD), bad]

    return per_experiment(kind, experiments, "Bad updates", panels, notes)


def _is_minimal_or_unmasked(line: Line) -> bool:
    return line.objective.rule == "negative" or line.objective.name == "pg_is"


def draw_relaxation_threshold(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 6: both sides of the clip lifted for ever more tokens, and the tokens still clipped."""
    experiments = narrowed(
        material.experiments, _is_clip_or_relaxed_both, lambda line: line.objective.relax == "both"
    )
    if not experiments:
        return Lacking(
            "no run relaxes both sides of the clip",
            "train grpo_clip_higher, and relax_both with several algorithm.alpha",
        )
    notes: list[str] = []
    if not has([line for e in experiments for line in e.lines], "clipped/rollout_prob"):
        notes.append("Rollout probability and entropy of clipped tokens: set tracking.clipped_tokens_every.")
    else:
        notes.append(
            "Clipped tokens are the 50 most often masked ones of each gradient step and sign that runs list, "
            "each occurrence counting once."
        )

    def panels(experiment: Experiment) -> list[CurvePanel]:
        probability = ("μ of clipped tokens", "clipped/rollout_prob")
        entropy = ("entropy at clipped tokens, nats", "clipped/entropy")
        return plain(experiment.lines, REWARD, probability, entropy)

    return per_experiment(kind, experiments, "Relaxing the clip for rare tokens", panels, notes)


def _is_clip_or_relaxed_both(line: Line) -> bool:
    own = line.objective
    return own.rule == "ratio" and own.anchor == "rollout" and own.relax in ("none", "both")


def draw_relaxation_side(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 7: one side of the clip lifted for rare tokens, or both."""

    def is_clip(line: Line) -> bool:
        return line.objective.rule == "ratio" and line.objective.anchor == "rollout"

    experiments = narrowed(material.experiments, is_clip, lambda line: line.objective.relax in ("high", "low"))
    if not experiments:
        return Lacking(
            "no run relaxes one side of the clip",
            "train grpo_clip_higher, relax_high, relax_low and relax_both with the same algorithm.alpha",
        )
    return per_experiment(
        kind, experiments, "The side of the clip that is relaxed", lambda e: plain(e.lines, REWARD, ENTROPY)
    )
