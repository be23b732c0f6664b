"""Draws Figures 6 and 7: the clip relaxed for tokens of low probability under the rollout policy."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import CurvePanel
from megatron_dppo.analysis.figures.experiment_figures import ENTROPY, REWARD, per_experiment, plain
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material, has
from megatron_dppo.analysis.figures.runs import Experiment, Line


def draw_relaxation_threshold(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 6: both sides of the clip lifted for ever more tokens, and the tokens still clipped."""
    experiments = [
        replace(e, lines=tuple(filter(_is_clip_or_relaxed_both, e.lines))) for e in material.experiments
    ]
    experiments = [e for e in experiments if any(line.objective.relax == "both" for line in e.lines)]
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

    experiments = [replace(e, lines=tuple(filter(is_clip, e.lines))) for e in material.experiments]
    experiments = [e for e in experiments if any(line.objective.relax in ("high", "low") for line in e.lines)]
    if not experiments:
        return Lacking(
            "no run relaxes one side of the clip",
            "train grpo_clip_higher, relax_high, relax_low and relax_both with the same algorithm.alpha",
        )
    return per_experiment(
        kind, experiments, "The side of the clip that is relaxed", lambda e: plain(e.lines, REWARD, ENTROPY)
    )
