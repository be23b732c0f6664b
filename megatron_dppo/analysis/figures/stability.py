"""Draws Figures 3 to 7: training stability, and the clip relaxed for tokens that mu finds unlikely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_dppo.algorithms import Objective
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.curves import (
    ENTROPY,
    EXTREMES,
    MISMATCH,
    REWARD,
    CurvePanel,
    extremes,
    keep_lines,
    per_experiment,
    plain,
    score_of_paper,
)
from megatron_dppo.analysis.figures.material import AlgorithmLine, Experiment, Kind, Lacking, Material, has
from megatron_dppo.analysis.figures.style import alpha_of, relaxed

CLIPPED_MU = ("μ of clipped tokens", "clipped/mu_mean")
CLIPPED_ENTROPY = ("entropy at clipped tokens, nats", "clipped/entropy_mean")
_NO_EXTREMES = (
    "Without max and min of π − μ: these runs have no mismatch/prob_diff_max and mismatch/prob_diff_min, which "
    "older versions did not record."
)
_OTHER_PAIRS = "The paper's pair is a divergence with both anchors, which is not among these runs."


def draw_stability(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 3: reward, score and mismatch of the algorithms that section 5 compares.

    What Figures 4 to 7 vary is left out: minimal masks, divergences around recomputed log-probs, relaxed clips.
    """
    experiments = [
        replace(e, lines=kept)
        for e in material.experiments
        if len(kept := tuple(filter(_is_compared, e.lines))) > 1 or kept == e.lines
    ]
    if not experiments:
        return Lacking(
            "no two runs of one experiment are among the algorithms of section 5",
            "train dppo_binary_tv, and pg_is, pg_tis, grpo_clip_higher or minirl",
        )

    def panels(experiment: Experiment) -> list[CurvePanel]:
        lines = experiment.lines
        score = score_of_paper(lines)
        return [*plain(lines, REWARD), *score, *plain(lines, MISMATCH), extremes(lines)]

    known = [line for e in experiments for line in e.lines]
    notes = [] if any(has(known, metric) for metric in EXTREMES[1:]) else [_NO_EXTREMES]
    return per_experiment(kind, experiments, "Stability", panels, notes, columns=4)


def _is_compared(line: AlgorithmLine) -> bool:
    own = line.objective
    is_decoupled = own.rule == "divergence" and own.anchor == "recomputed"
    return own.rule != "negative" and relaxed(own) == "none" and not is_decoupled


def draw_anchor(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 4: a divergence around the rollout's log-probs and around recomputed ones.

    Without such a pair, pairs of another rule take its place.
    """
    pairs = [replace(e, lines=_by_anchor(e.lines)) for e in material.experiments]
    if not (pairs := [experiment for experiment in pairs if experiment.lines]):
        return Lacking(
            "no two runs have the same trust region around the rollout's and around recomputed log-probs",
            "train dppo_binary_kl and dppo_binary_kl_decoupled, or grpo_clip_higher and minirl",
        )
    of_divergence = keep_lines(pairs, _is_divergence, _is_divergence)
    return per_experiment(
        kind,
        of_divergence or pairs,
        "The anchor of the trust region",
        lambda e: plain(e.lines, REWARD, MISMATCH),
        [] if of_divergence else [_OTHER_PAIRS],
    )


def _is_divergence(line: AlgorithmLine) -> bool:
    return line.objective.rule == "divergence"


def _by_anchor(lines: Sequence[AlgorithmLine]) -> tuple[AlgorithmLine, ...]:
    """Return the lines that have a counterpart which differs only in the anchor."""

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
    experiments = keep_lines(
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


def _is_minimal_or_unmasked(line: AlgorithmLine) -> bool:
    return line.objective.rule == "negative" or line.objective.name == "pg_is"


def draw_relaxation_threshold(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 6: both sides of the clip lifted for ever more tokens, and the tokens still clipped."""
    experiments = keep_lines(
        material.experiments, _is_clip_or_relaxed_both, lambda line: relaxed(line.objective) == "both"
    )
    if not experiments:
        return Lacking(
            "no run relaxes both sides of the clip",
            "train grpo_clip_higher, and relax_both with several algorithm.alpha",
        )
    known = [line for e in experiments for line in e.lines]
    notes = [
        "Clipped tokens are all learning tokens that a run's own mask drops, of both signs of the advantage; "
        "each counts once."
    ]
    if not has(known, CLIPPED_MU[1]):
        notes = [
            "Without rollout probability and entropy of clipped tokens: these runs have no "
            "clipped/num_tokens_* and clipped/mu_mean_*, which older versions did not record, or their masks "
            "dropped no token."
        ]
    return per_experiment(
        kind,
        experiments,
        "Relaxing the clip for rare tokens",
        lambda e: plain(e.lines, REWARD, CLIPPED_MU, CLIPPED_ENTROPY),
        notes,
    )


def _is_clip_or_relaxed_both(line: AlgorithmLine) -> bool:
    own = line.objective
    return own.rule == "ratio" and own.anchor == "rollout" and relaxed(own) in ("none", "both")


def draw_relaxation_side(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw Figure 7: one side of the clip lifted for rare tokens, or both, with the same alpha."""

    def is_clip(line: AlgorithmLine) -> bool:
        return line.objective.rule == "ratio" and line.objective.anchor == "rollout"

    def is_one_sided(line: AlgorithmLine) -> bool:
        return relaxed(line.objective) in ("high", "low")

    experiments = [_of_equal_alpha(e) for e in keep_lines(material.experiments, is_clip, is_one_sided)]
    if not experiments:
        return Lacking(
            "no run relaxes one side of the clip",
            "train grpo_clip_higher, relax_high, relax_low and relax_both with the same algorithm.alpha",
        )

    def panels(experiment: Experiment) -> list[CurvePanel]:
        entropy = [replace(panel, is_logarithmic=True) for panel in plain(experiment.lines, ENTROPY)]
        return [*plain(experiment.lines, REWARD), *entropy]

    return per_experiment(kind, experiments, "The side of the clip that is relaxed", panels)


def _of_equal_alpha(experiment: Experiment) -> Experiment:
    """Leave out lines that relax both sides with an alpha that no line of one side has."""
    alphas = {
        alpha_of(line.objective) for line in experiment.lines if relaxed(line.objective) in ("high", "low")
    }
    kept = [e for e in experiment.lines if relaxed(e.objective) != "both" or alpha_of(e.objective) in alphas]
    return replace(experiment, lines=tuple(kept))
