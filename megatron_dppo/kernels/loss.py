"""The policy loss from logits, and the results that both forms of the loss return.

Forward reads the logits once, and backward writes their gradient once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.inputs import CLAMP_COUNTED_FROM
from megatron_dppo.algorithms.loss import TokenUpdates, update_metrics
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.combine import check_values, checked_tokens, combine_statistics
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.kernels.shards import PackedResponses
from megatron_dppo.types import RolloutTokens


@dataclass(frozen=True, eq=False)
class FusedPolicyLoss(TokenUpdates):
    """The loss and its results for each token, float32 (float64 for float64). Only `loss_sum` has gradient.

    Logits outside `loss_mask` are not read: log-prob, entropy, divergence, weight and coefficient are 0, mask
    is False, ratio 1, and top-K log-probs are -inf.
    """

    loss_sum: Float[Tensor, ""]  # the same on every tensor-parallel rank
    log_probs: Float[Tensor, " T"]  # log pi(y_t)
    entropy: Float[Tensor, " T"]  # nats
    topk_log_probs: Float[Tensor, "T K"] | None  # of the columns in use; -inf for an id of -1


def packed_policy_loss(
    logits: Float[Tensor, "T V"],
    tokens: RolloutTokens,
    objective: Objective,
    layer: OutputLayer,
    responses: PackedResponses | None = None,
    *,
    inplace_backward: bool = False,
    debug: bool = False,
) -> FusedPolicyLoss:
    """`fused_policy_loss` of a record of tokens, such as a micro-batch; it takes and raises the same.

    `responses` may be split over context-parallel ranks, which then call this together.
    """
    layer.require(logits, None)
    ready = checked_tokens(objective, tokens, logits, logits.shape[0], layer.shard.vocab_size)
    if debug:
        check_values(objective, ready, layer.shard, logits.shape[1])
    statistics = layer.statistics(logits, ready.targets, ready.topk_ids, ready.loss_mask)
    rows, topk_log_probs = combine_statistics(statistics, ready, objective, responses)
    settings = layer.settings(with_entropy=objective.entropy_coef != 0)
    loss_sum = ops.loss_of_rows(logits, rows, ready.targets, *settings, inplace_backward)
    return describe(loss_sum, rows, topk_log_probs, has_topk=tokens.topk is not None)


def describe(
    loss_sum: Float[Tensor, ""],
    rows: Float[Tensor, "ROWS T"],
    topk_log_probs: Float[Tensor, "T K"],
    *,
    has_topk: bool,
) -> FusedPolicyLoss:
    """The loss and the rows of `combine` by name."""
    named = dict(zip(ROWS, rows.detach(), strict=True))
    return FusedPolicyLoss(
        weight=named["weight"],
        mask=named["weight"] != 0,
        divergence=named["divergence"],
        ratio=named["ratio"],
        coefficient=named["coefficient"],
        loss_sum=loss_sum,
        log_probs=named["log_probs"],
        entropy=named["entropy"],
        topk_log_probs=topk_log_probs if has_topk else None,
    )


def fused_metrics(
    objective: Objective,
    out: FusedPolicyLoss,
    rollout_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    old_log_probs: Float[Tensor, " T"] | None = None,
) -> dict[str, Tensor]:
    """The additive metrics that `algorithms.policy_loss` documents, of the same tokens [T]."""
    mu, advantages = (
        torch.where(loss_mask, x.to(out.ratio.dtype), 0.0) for x in (rollout_log_probs, advantages)
    )
    highest = torch.maximum(out.log_probs, mu)
    if objective.anchor == "recomputed" and old_log_probs is not None:
        highest = torch.maximum(highest, torch.where(loss_mask, old_log_probs.to(highest.dtype), 0.0))
    return update_metrics(
        objective,
        out,
        is_learning=loss_mask,
        log_probs=out.log_probs.clamp(max=0),
        rollout_log_probs=mu.clamp(max=0),
        advantages=advantages,
        num_clamped=(highest > CLAMP_COUNTED_FROM).sum(),
    )
