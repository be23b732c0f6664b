"""The policy loss: one gradient for every algorithm (Eq. 23), weighted by a trust region.

The divergence decides which tokens learn, the objective what they learn; the weight never enters the graph.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms.divergence import DIVERGENCES, TopKLogProbs, topk_partition
from megatron_dppo.algorithms.inputs import (
    CLAMP_COUNTED_FROM,
    PolicyLossInputs,
    TrustRegionTokens,
    check_shapes,
    check_values,
)
from megatron_dppo.algorithms.loss_terms import added_terms
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.responses import Responses, require_lengths
from megatron_dppo.errors import ConfigError, Problem

BAD_UPDATE = 0.5  # mu - pi of a negative token from which its update is bad (section 5.3, the formula: >=)


@dataclass(frozen=True, eq=False)
class TokenUpdates:
    """The objective's results for each token.

    Rows outside `loss_mask` have weight 0, mask False, divergence 0, ratio 1, coefficient 0.
    """

    weight: Float[Tensor, " T"]  # M, the factor of the update: 0 or 1 for a mask, < 0 to reverse the update
    mask: Bool[Tensor, " T"]  # M is not 0, the tokens that learn
    divergence: Float[Tensor, " T"]  # of the policy from its anchor; Binary-TV if the objective has none
    ratio: Float[Tensor, " T"]  # pi/mu, uncapped
    coefficient: Float[Tensor, " T"]  # M min(r, C) A without token_weights; r of what `importance` names


@dataclass(frozen=True, eq=False)
class PolicyLossOutput(TokenUpdates):
    """The loss and its results for each token. Only `loss_sum` carries gradient."""

    loss_sum: Float[Tensor, ""]  # divide by a global count, or weigh tokens with token_weights()
    metrics: dict[str, Tensor]  # scalars that add up over micro-batches and ranks; see `policy_loss`


def policy_loss(objective: Objective, inputs: PolicyLossInputs) -> PolicyLossOutput:
    """Sum over learning tokens of -(M min(r, C) A).detach() * log pi(y): its gradient is minus Eq. 23.

    At C = inf that is the gradient of the surrogate of Eq. 11; above a finite cap it keeps C A grad log pi,
    which autograd through min(r, C) would drop. The value is not the surrogate: do not plot it as such. With
    `entropy_coef` the weighted entropy of all learning tokens, masked ones included, is subtracted; the
    `LOSS_TERMS` in use are added.

    Metrics are float64 and additive, over the tokens of `loss_mask`. Counts: `num_loss_tokens`; `num_positive`
    and `num_negative` (by sign of A); `num_masked_positive` and `num_masked_negative` (of those, M = 0);
    `num_ratio_capped` (pi/mu of the token > C); `num_bad_updates` (A < 0 and mu - pi >= .5, masked or not);
    `num_bad_updates_kept` (of those, M not 0);
    `num_infinite_divergence`; `num_clamped_log_probs` (a log-prob was more than 1e-3 above 0). Sums:
    `sum_divergence` (the finite ones), `sum_abs_prob_diff` (|pi - mu|); of a soft trust region also
    `sum_weight_positive` and `sum_weight_negative` (M by sign of A).

    Raises:
        ConfigError: An input is missing, has the wrong shape or type, or holds what no learning token may have:
            a rollout log-prob that is not finite, a repeated Top-K id, a NaN of anything but `log_probs`.
    """
    tokens = learning_tokens(objective, inputs)
    updates = token_updates(objective, tokens)
    assert tokens.num_clamped is not None, "`learning_tokens` counts them"
    return PolicyLossOutput(
        loss_sum=_loss_sum(objective, tokens, updates),
        **vars(updates),
        metrics=update_metrics(
            objective,
            updates,
            is_learning=tokens.loss_mask,
            log_probs=tokens.log_probs,
            rollout_log_probs=tokens.rollout_log_probs,
            advantages=tokens.advantages,
            num_clamped=tokens.num_clamped,
        ),
    )


def required_inputs(objective: Objective, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the tensors that `objective` reads, by name."""
    topk = inputs.topk
    needed: dict[str, Tensor | None] = {
        "log_probs": inputs.log_probs,
        "rollout_log_probs": inputs.rollout_log_probs,
        "advantages": inputs.advantages,
    }
    if objective.anchor == "recomputed":
        needed["old_log_probs"] = inputs.old_log_probs
    needed |= {name: getattr(inputs, name) for name in objective.inputs_of_terms}
    if objective.needs_topk:
        needed["targets"] = inputs.targets
        needed["topk.ids"] = None if topk is None else topk.ids
        needed["topk.rollout_log_probs"] = None if topk is None else topk.rollout_log_probs
        needed["topk.log_probs"] = None if topk is None else topk.log_probs
    if objective.entropy_coef != 0:
        needed["entropy"] = inputs.entropy
    missing = dict.fromkeys(name.split(".")[0] for name, tensor in needed.items() if tensor is None)
    if objective.needs_responses and inputs.response_lengths is None:
        missing["response_lengths"] = None
    if missing:
        raise ConfigError([_missing(objective, name) for name in missing])
    optional = {name: getattr(inputs, name) for name in ("loss_mask", "token_weights", "positions", "lengths")}
    present = {name: tensor for name, tensor in (needed | optional).items() if tensor is not None}
    check_shapes(present)
    return present


def _missing(objective: Objective, name: str) -> Problem:
    expected = {
        "old_log_probs": "a [T] tensor, because anchor = 'recomputed'",
        **{read: f"a [T] tensor, because {coef} is not 0" for read, coef in objective.inputs_of_terms.items()},
        "topk": f"a TopKLogProbs, because the divergence is {objective.divergence}",
        "targets": f"a [T] tensor of sampled ids, because the divergence is {objective.divergence}",
        "entropy": "a [T] tensor with gradient, because entropy_coef is not 0",
        "response_lengths": "a [B] tensor of integers, because the rule reads complete responses",
    }.get(name, "a [T] tensor")
    return Problem(f"PolicyLossInputs.{name} of {objective.name}", "none", expected, f"Pass {name}=...")


def learning_tokens(
    objective: Objective, inputs: PolicyLossInputs, *, has_known_values: bool = False
) -> TrustRegionTokens:
    """Check the inputs that `objective` reads, and neutralise the rows that do not learn.

    Neutralising comes before all arithmetic, so a NaN of an ignored row reaches neither value nor gradient.
    Set `has_known_values` if a loss was computed from these inputs before. Their values are then not checked
    again, and the call does not synchronise with the device.
    """
    present = required_inputs(objective, inputs)
    lengths = inputs.response_lengths if objective.needs_responses else None
    if lengths is not None and not has_known_values:
        require_lengths(lengths, inputs.log_probs.numel(), objective.name)
    dtype = torch.float64 if inputs.log_probs.dtype == torch.float64 else torch.float32
    is_learning = torch.ones_like(inputs.log_probs, dtype=torch.bool)
    if inputs.loss_mask is not None:
        is_learning = inputs.loss_mask != 0

    def clean(values: Tensor) -> Tensor:
        return torch.where(is_learning, values.to(dtype), 0.0)

    trained, rollout = clean(inputs.log_probs), clean(inputs.rollout_log_probs.detach())
    old = present.get("old_log_probs")
    anchor = rollout if old is None else clean(old.detach())
    ref, weights = present.get("ref_log_probs"), inputs.token_weights
    tokens = TrustRegionTokens(
        loss_mask=is_learning,
        trained=trained,
        log_probs=trained.detach(),
        rollout_log_probs=rollout,
        anchor_log_probs=anchor,
        ref_log_probs=None if ref is None else clean(ref.detach()),
        advantages=clean(inputs.advantages.detach()),
        weights=clean(torch.ones_like(rollout) if weights is None else weights.detach()),
        divergence=torch.zeros_like(rollout),
        num_clamped=(torch.stack([trained.detach(), rollout, anchor]) > CLAMP_COUNTED_FROM).any(0).sum(),
        topk=_clean_topk(objective, inputs.topk, is_learning, dtype) if "topk.ids" in present else None,
        targets=torch.where(is_learning, present["targets"].long(), 0) if "targets" in present else None,
        entropy=clean(present["entropy"]) if "entropy" in present else None,
        responses=None if lengths is None else Responses(lengths.long(), is_learning),
        places=_clean_places(inputs, is_learning),
    )
    if not has_known_values:
        check_values(tokens)
    return _clamped(tokens)


def _clean_places(inputs: PolicyLossInputs, is_learning: Bool[Tensor, " T"]) -> tuple[Tensor, Tensor] | None:
    if inputs.positions is None or inputs.lengths is None:
        return None
    return torch.where(is_learning, inputs.positions, 0), torch.where(is_learning, inputs.lengths, 0)


@torch.no_grad()
def token_updates(objective: Objective, tokens: TrustRegionTokens) -> TokenUpdates:
    """How far each token's policy has moved, whether it may learn, and with which weight."""
    log_masses = compared_log_masses(objective, tokens)
    divergence = DIVERGENCES[objective.divergence].function(*log_masses)
    weight = learning_weight(objective, tokens, log_masses, divergence)
    ratio = (tokens.log_probs - tokens.rollout_log_probs).exp()
    importance = ratio
    if objective.importance == "response":
        assert tokens.responses is not None, "required inputs are checked first"
        importance = tokens.responses.mean(tokens.log_probs - tokens.rollout_log_probs).exp()
    elif objective.importance == "rule":
        importance = torch.ones_like(ratio)
    is_active = (weight != 0) & (tokens.advantages != 0)
    scaled = importance.clamp(max=objective.ratio_cap) * tokens.advantages * weight
    coefficient = torch.where(is_active, scaled, 0.0)
    return TokenUpdates(
        weight=weight, mask=weight != 0, divergence=divergence, ratio=ratio, coefficient=coefficient
    )


def learning_weight(
    objective: Objective,
    tokens: TrustRegionTokens,
    log_masses: tuple[Tensor, Tensor],
    divergence: Float[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """Return M; 0 outside the loss mask, and 1 if A = 0, because there is no update to drop.

    Args:
        objective: Whose trust region.
        tokens: T of them.
        log_masses: What the objective's divergence compares; see `compared_log_masses`.
        divergence: What it finds.
    """
    seen = as_a_rule_reads(objective, tokens, log_masses, divergence)
    weight = torch.where(tokens.advantages == 0, 1.0, objective.weigh(seen))
    return torch.where(tokens.loss_mask, weight, 0.0)


def as_a_rule_reads(
    objective: Objective,
    tokens: TrustRegionTokens,
    log_masses: tuple[Tensor, Tensor],
    divergence: Float[Tensor, " T"],
) -> TrustRegionTokens:
    """Return the tokens with the objective's divergence, and with its outcomes if it has several."""
    return replace(tokens, divergence=divergence, outcomes=log_masses if objective.needs_topk else None)


def compared_log_masses(objective: Objective, tokens: TrustRegionTokens) -> tuple[Tensor, Tensor]:
    """What the objective's divergence compares, of policy and anchor: [T] log-probs, or [T, outcomes]."""
    if not objective.needs_topk:
        return tokens.log_probs, tokens.anchor_log_probs
    assert tokens.topk is not None and tokens.targets is not None, "required inputs are checked first"
    return topk_partition(
        tokens.topk,
        tokens.targets,
        tokens.log_probs,
        tokens.rollout_log_probs,
        top_k=objective.top_k,
        sampled_token=objective.sampled_token,
        include_other=objective.include_other,
    )


def _clean_topk(
    objective: Objective, topk: TopKLogProbs | None, is_learning: Tensor, dtype: torch.dtype
) -> TopKLogProbs:
    """The columns in use; ignored rows become padding, and the log-probs of padding -inf."""
    assert topk is not None, "required inputs are checked first"
    used = slice(None, objective.top_k)
    ids = torch.where(is_learning[:, None], topk.ids[:, used].long(), -1)

    def clean(columns: Tensor) -> Tensor:
        return torch.where(ids >= 0, columns.detach()[:, used].to(dtype), -math.inf)

    return TopKLogProbs(ids, rollout_log_probs=clean(topk.rollout_log_probs), log_probs=clean(topk.log_probs))


def _clamped(tokens: TrustRegionTokens) -> TrustRegionTokens:
    """Rounding leaves log-probs of certain tokens a little above 0; the divergences need them at most 0."""
    topk = tokens.topk
    if topk is not None:
        topk = TopKLogProbs(topk.ids, topk.rollout_log_probs.clamp(max=0), topk.log_probs.clamp(max=0))
    return replace(
        tokens,
        log_probs=tokens.log_probs.clamp(max=0),
        rollout_log_probs=tokens.rollout_log_probs.clamp(max=0),
        anchor_log_probs=tokens.anchor_log_probs.clamp(max=0),
        topk=topk,
    )


def _loss_sum(objective: Objective, tokens: TrustRegionTokens, updates: TokenUpdates) -> Tensor:
    """The only place with gradient. Rows of coefficient 0 leave the graph: their log pi may be -inf."""
    has_weight = tokens.token_weights != 0
    is_live = (updates.coefficient != 0) & has_weight
    scale = torch.where(is_live, updates.coefficient * tokens.token_weights, 0.0)
    loss_sum = -(scale * torch.where(is_live, tokens.trained_log_probs, 0.0)).sum()
    if tokens.entropy is not None:
        entropy = torch.where(tokens.loss_mask & has_weight, tokens.entropy, 0.0)
        loss_sum = loss_sum - objective.entropy_coef * (entropy * tokens.token_weights).sum()
    for loss, by_log_prob in added_terms(objective, tokens, updates.ratio):
        is_moving = (by_log_prob != 0) & tokens.log_probs.isfinite()
        moving = torch.where(is_moving, tokens.trained_log_probs, 0.0)
        loss_sum = (
            loss_sum + (loss + torch.where(is_moving, by_log_prob, 0.0) * (moving - moving.detach())).sum()
        )
    return loss_sum


@torch.no_grad()
def update_metrics(
    objective: Objective,
    updates: TokenUpdates,
    *,
    is_learning: Bool[Tensor, " T"],
    log_probs: Float[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    num_clamped: Tensor,
) -> dict[str, Tensor]:
    """The counts and sums that `policy_loss` documents, float64 scalars.

    Args:
        objective: Objective with the ratio cap; its rule decides whether M is more than a mask.
        updates: What became of the tokens.
        is_learning: [T] bool. Where False, log-probs and advantage must be 0.
        log_probs: [T] log pi <= 0.
        rollout_log_probs: [T] log mu <= 0.
        advantages: [T].
        num_clamped: Scalar: log-probs that were more than rounding above 0.
    """
    is_positive, is_negative = advantages > 0, advantages < 0
    drop_in_prob = rollout_log_probs.exp() - log_probs.exp()
    is_infinite = updates.divergence.isinf()
    sums = {
        "num_loss_tokens": is_learning,
        "num_positive": is_positive,
        "num_negative": is_negative,
        "num_masked_positive": is_positive & ~updates.mask,
        "num_masked_negative": is_negative & ~updates.mask,
        "num_ratio_capped": is_learning & (updates.ratio > objective.ratio_cap),
        "num_bad_updates": is_negative & (drop_in_prob >= BAD_UPDATE),
        "num_bad_updates_kept": is_negative & updates.mask & (drop_in_prob >= BAD_UPDATE),
        "num_infinite_divergence": is_infinite,
        "num_clamped_log_probs": num_clamped,
        "sum_divergence": torch.where(is_infinite, 0.0, updates.divergence),
        "sum_abs_prob_diff": drop_in_prob.abs(),
    }
    if objective.is_soft:
        sums["sum_weight_positive"] = torch.where(is_positive, updates.weight, 0.0)
        sums["sum_weight_negative"] = torch.where(is_negative, updates.weight, 0.0)
    return {name: values.sum(dtype=torch.float64) for name, values in sums.items()}
