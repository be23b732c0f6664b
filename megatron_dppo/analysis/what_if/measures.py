"""Measures what a trust region does with kept tokens: the tokens it masks and the gradient that remains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, policy_loss, preset, shadow_weights
from megatron_dppo.algorithms.loss import learning_tokens
from megatron_dppo.algorithms.loss_terms import added_terms
from megatron_dppo.algorithms.own_rule import Own
from megatron_dppo.algorithms.paper_rules import Unmasked
from megatron_dppo.algorithms.shadow import rule_values
from megatron_dppo.analysis.what_if.question import Variant
from megatron_dppo.metrics.engine_comparison import Routes
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_mismatch

PROB_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Bins of mu: from each edge up to the next, the last with its own upper edge."""
REFERENCES = ("dppo_topk_tv", "dppo_topk_kl")
"""Presets that, with the saved columns, come nearest to DPPO with the full vocabulary's divergence."""
FACTORS = (0.5, 1.0, 2.0)
"""Factors that scale the main threshold."""


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """N learning tokens of kept rollouts, as the policy of one checkpoint sees them with one way of routing."""

    inputs: PolicyLossInputs  # with the token_weights of the run's loss; all tokens learn
    score_norms: Tensor  # [N] |d log pi(y) / dh|, h the input of the output layer
    rollouts: Tensor  # [N] int64: rollout of each token, from 1


TokensByRoutes = Mapping[Routes, PolicyTokens]


@dataclass(frozen=True, eq=False)
class Updates:
    """What an objective makes of N tokens, in float64."""

    weight: Tensor  # [N] M: 0 or 1 of a mask
    coefficient: Tensor  # [N] M min(r, C) A
    unmasked: Tensor  # [N] min(r, C) A, without the trust region; r of the response where importance is
    gradient: Tensor  # [N] factor of grad log pi(y) in the loss: coefficient and added terms, token-weighted
    divergence: Tensor  # [N]


@torch.no_grad()
def updates_of(objective: Objective, inputs: PolicyLossInputs) -> Updates:
    """Evaluate an objective on tokens."""
    out = policy_loss(objective, inputs)
    importance = "token" if objective.importance == "rule" else objective.importance
    free = Unmasked(name=objective.name, importance=importance, ratio_cap=objective.ratio_cap)
    gradient = out.coefficient.double()
    if inputs.token_weights is not None:
        gradient = gradient * inputs.token_weights.double()
    tokens = learning_tokens(objective, inputs, has_known_values=True)
    for _, by_log_prob in added_terms(objective, tokens, out.ratio):
        gradient = gradient - by_log_prob.double()
    unmasked = policy_loss(free, inputs).coefficient.double()
    return Updates(out.weight.double(), out.coefficient.double(), unmasked, gradient, out.divergence.double())


def cosine(left: Tensor, right: Tensor, score_norms: Tensor) -> float:
    """Return the cosine of two losses' gradients by the hidden states before the output layer; NaN of none.

    The losses have the factors `left` and `right` of grad log pi(y), all arguments are of the same N tokens.
    """
    squares = score_norms.double().square()

    def product(a: Tensor, b: Tensor) -> float:
        return float((a * b * squares).sum())

    size = (product(left, left) * product(right, right)) ** 0.5
    return max(-1.0, min(1.0, product(left, right) / size)) if size > 0 else math.nan


def reference_gradients(ratio_cap: float, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the gradient factors [N] of presets with that cap, by name: no mask, Top-K of all columns."""
    objectives = {"unmasked": preset("pg_is", ratio_cap=ratio_cap)}
    if inputs.topk is not None and (top_k := inputs.topk.ids.shape[1]) > 0:
        objectives |= {name: preset(name, ratio_cap=ratio_cap, top_k=top_k) for name in REFERENCES}
    return {name: updates_of(objective, inputs).gradient for name, objective in objectives.items()}


def figures_of(
    objective: Objective, tokens: PolicyTokens, own_weight: Tensor | None, references: Mapping[str, Tensor]
) -> tuple[dict[str, Any], Tensor]:
    """Return the figures of one variant, see docs/reference/comparing_runs.md, and its weights M.

    Args:
        objective: Objective of the variant.
        tokens: N tokens.
        own_weight: [N] weights M of the run's own variant; None if this is it.
        references: `reference_gradients` with the objective's cap.
    """
    inputs, norms = tokens.inputs, tokens.score_norms
    updates = updates_of(objective, inputs)
    own_weight = updates.weight if own_weight is None else own_weight
    advantages, is_kept = inputs.advantages, updates.weight != 0
    acts, positive, negative = advantages != 0, advantages > 0, advantages < 0
    masked = ~is_kept & acts
    ratio = (inputs.log_probs - inputs.rollout_log_probs).exp()
    mass = (ratio.clamp(max=objective.ratio_cap) * advantages.abs()).double()
    finite = updates.divergence[updates.divergence.isfinite()]

    def of(which: Tensor) -> dict[str, float]:
        unmasked = references["unmasked"][which]
        size = updates.unmasked[acts & which].abs().sum()
        kept_size = updates.coefficient[acts & which].abs().sum()
        return {
            "masked_fraction": _mean(masked, acts & which),
            "gradient_mass_kept": float(kept_size / size) if size > 0 else math.nan,
            "cosine_unmasked": cosine(updates.gradient[which], unmasked, norms[which]),
        }

    figures: dict[str, Any] = {
        **of(torch.ones_like(acts)),
        "masked_fraction_positive": _mean(masked, positive),
        "masked_fraction_negative": _mean(masked, negative),
        "weight_mean_positive": _mean(updates.weight, positive),
        "weight_mean_negative": _mean(updates.weight, negative),
        "agreement": _mean(is_kept == (own_weight != 0), acts),
        "dropped_mass_fraction": float(mass[masked].sum() / mass.sum().clamp(min=1e-300)),
        "rollout_prob_masked": float(inputs.rollout_log_probs[masked].double().exp().mean()),
        "divergence_p999": float(np.percentile(finite.numpy(), 99.9)) if finite.numel() else math.nan,
        "by_prob": _by_prob(updates.weight, inputs),
        "threshold": main_thresholds(objective),
        "sensitivity": sensitivity(objective, inputs),
    }
    for name in REFERENCES:
        other = references.get(name)
        figures[f"cosine_{name}"] = None if other is None else cosine(updates.gradient, other, norms)
    if objective.is_soft:
        figures["weight_mean"] = _mean(updates.weight, acts)
    if values := rule_values(objective, inputs):
        figures["rule_values"] = {name: float(each.double().mean()) for name, each in values.items()}
    rollouts: list[int] = tokens.rollouts.unique().tolist()
    if len(rollouts) > 1:
        figures["by_rollout"] = [{"rollout": rollout, **of(tokens.rollouts == rollout)} for rollout in rollouts]
    return figures, updates.weight


def _by_prob(weight: Tensor, inputs: PolicyLossInputs) -> list[dict[str, Any]]:
    mu = inputs.rollout_log_probs.double().exp()
    places = torch.bucketize(mu, torch.tensor(PROB_EDGES[1:-1], dtype=torch.float64), right=True)
    return [
        {
            "sign": sign,
            "prob_low": PROB_EDGES[index],
            "prob_high": PROB_EDGES[index + 1],
            "num_tokens": int((which := has_sign & (places == index)).sum()),
            "masked_fraction": _mean(weight == 0, which),
            "weight_mean": _mean(weight, which),
        }
        for sign, has_sign in (("positive", inputs.advantages > 0), ("negative", inputs.advantages < 0))
        for index in range(len(PROB_EDGES) - 1)
    ]


def _mean(values: Tensor, which: Tensor) -> float:
    return float(values[which].double().mean()) if bool(which.any()) else math.nan


def evaluate_variants(
    variants: Sequence[Variant], tokens: TokensByRoutes
) -> tuple[list[dict[str, Any]], dict[Routes, dict[str, Any]]]:
    """Evaluate the trust regions; the first variant is the run's own.

    Returns:
        One row for each variant and way of routing, with the figures of docs/reference/comparing_runs.md, and
        for each way of routing the `agreement` of all pairs.
    """
    rows: list[dict[str, Any]] = []
    pairs: dict[Routes, dict[str, Any]] = {}
    for routes, of_routes in tokens.items():
        references = cache(partial(reference_gradients, inputs=of_routes.inputs))
        weights = list[Tensor]()
        for variant in variants:
            own_weight, objective = weights[0] if weights else None, variant.objective
            figures, weight = figures_of(objective, of_routes, own_weight, references(objective.ratio_cap))
            weights.append(weight)
            row = {"variant": variant.name, "preset": variant.preset, **variant.fields, "routes": routes}
            rows.append(row | figures)
        pairs[routes] = agreement(weights, of_routes.inputs.advantages != 0)
    return rows, pairs


def sensitivity(objective: Objective, inputs: PolicyLossInputs) -> list[dict[str, float]]:
    """Return masked share and mean M over tokens with A != 0 at each factor of the threshold, if it has one."""
    scaled = {str(factor): scale_threshold(objective, factor) for factor in FACTORS}
    objectives = {name: each for name, each in scaled.items() if each is not None}
    acts = inputs.advantages != 0
    return [
        {
            "factor": float(name),
            "masked_fraction": _mean(weight == 0, acts),
            "weight_mean": _mean(weight, acts),
        }
        for name, weight in (shadow_weights(objectives, inputs) if objectives else {}).items()
    ]


def agreement(weights: Sequence[Tensor], acts: Tensor) -> dict[str, Any]:
    """Compare all pairs of variants on the tokens that `acts` marks.

    Returns:
        `same_decision`: share of tokens that both mask or both keep, a row for each variant.
        `weight_correlation`: Pearson's, of the two variants' weights M; NaN if one is constant.
    """
    own = torch.stack([weight[acts] for weight in weights])
    kept = own != 0
    same = [[float((a == b).double().mean()) for b in kept] for a in kept]
    correlation = own.new_full((len(weights), len(weights)), torch.nan)
    if own.shape[1] > 1:
        correlation = own.corrcoef().reshape(len(weights), -1)
    return {"same_decision": same, "weight_correlation": correlation.tolist()}


def mismatch_by_routes(tokens: TokensByRoutes) -> dict[Routes, dict[str, float]]:
    """Return the distance of pi from mu, as a run reports it, for each way of routing."""
    found: dict[Routes, dict[str, float]] = {}
    for routes, of_routes in tokens.items():
        inputs = of_routes.inputs
        metrics, is_learning = Metrics(), torch.ones_like(inputs.log_probs, dtype=torch.bool)
        add_mismatch(metrics, inputs.log_probs, inputs.rollout_log_probs, is_learning)
        found[routes] = {name.removeprefix("mismatch/"): value for name, value in metrics.values().items()}
    return found


def main_thresholds(objective: Objective) -> dict[str, float]:
    """Return the numbers of the main threshold, or none if the rule has none or all are infinite.

    A custom rule's main threshold is its option `delta`, else its only numeric option.
    """
    if isinstance(objective, Own):
        options = objective.rule_options
        numbers = {name: float(x) for name, x in options.items() if type(x) in (int, float)}
        if "delta" in numbers:
            return {"delta": numbers["delta"]}
        return numbers if len(numbers) == 1 else {}
    found = {name: float(getattr(objective, name)) for name, each in objective.numbers.items() if each.is_main}
    return found if any(math.isfinite(value) for value in found.values()) else {}


def scale_threshold(objective: Objective, factor: float) -> Objective | None:
    """Return the objective with its main threshold multiplied by a factor, or `None` without a threshold."""
    found = main_thresholds(objective)
    if not found:
        return None
    if not isinstance(objective, Own):
        numbers = objective.numbers
        scaled = {x: v**factor if numbers[x].around_1 else v * factor for x, v in found.items()}
        return replace(objective, **scaled)
    options = {name: found[name] * factor if name in found else v for name, v in objective.rule_options.items()}
    return replace(objective, function=replace(objective.function, options=tuple(options.items())))
