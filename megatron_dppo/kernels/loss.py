"""The policy loss from logits, and the results that both forms of the loss return.

Forward reads the logits once, and backward writes their gradient once.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.inputs import CLAMP_COUNTED_FROM
from megatron_dppo.algorithms.loss import TokenUpdates, update_metrics
from megatron_dppo.algorithms.responses import require_lengths
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.combine import check_values, checked_tokens, combine_statistics, given_topk
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.kernels.shards import PackedResponses, VocabShard
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


def fused_policy_loss(
    logits: Float[Tensor, "T V"],
    targets: Integer[Tensor, " T"],
    rollout_log_probs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    objective: Objective,
    *,
    loss_mask: Bool[Tensor, " T"] | None = None,
    token_weights: Float[Tensor, " T"] | None = None,
    topk_ids: Integer[Tensor, "T K"] | None = None,
    topk_rollout_log_probs: Float[Tensor, "T K"] | None = None,
    old_log_probs: Float[Tensor, " T"] | None = None,
    ref_log_probs: Float[Tensor, " T"] | None = None,
    response_lengths: Integer[Tensor, " B"] | None = None,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    debug: bool = False,
) -> FusedPolicyLoss:
    """Compute `algorithms.policy_loss` of a micro-batch from logits (Eq. 12 and 23 of arXiv 2602.04879).

    If the vocabulary is split, all ranks of `tp_group` call this together, on the same tokens. One all-gather
    of [T, 4+K] numbers gives bitwise identical results on all of them.

    Args:
        logits: [T, V/tp] bfloat16, float32 or (on CPU) float64: this rank's columns.
        targets: [T] integer, global ids of the sampled tokens.
        rollout_log_probs: [T] log mu(y_t).
        advantages: [T].
        objective: Objective to optimise.
        loss_mask: [T] bool: the tokens that learn; `None` means all. Other tokens are not read.
        token_weights: [T] >= 0, multiplies each token's loss; `None` means 1.
        topk_ids: [T, K] integer ids of mu's most probable tokens, best first, -1 pads; needed by Top-K
            divergences, which use the first `top_k`. Otherwise all K are only reported.
        topk_rollout_log_probs: [T, K] log mu of them.
        old_log_probs: [T], needed if anchor = "recomputed".
        ref_log_probs: [T], needed if ref_kl_coef is not 0.
        response_lengths: [B] integers that sum to T, needed by rules over complete responses.
        temperature: Divides the logits.
        vocab_start: Global id of the first column.
        vocab_size: Vocabulary size of the model, without padding; `None` if there is no padding. Columns from
            `vocab_size` on are ignored.
        tp_group: The ranks that hold the other columns, shards in rank order.
        inplace_backward: Write the gradient over the logits; a second backward pass is refused.
        debug: Also check values, at the price of device synchronisations.

    Raises:
        ConfigError: An input is missing or of the wrong shape or type, the shard does not cover the vocabulary,
            or (always on CPU, on other devices with `debug`) a learning token's input has an invalid value.
    """
    tokens = RolloutTokens(
        targets=targets,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        token_weights=token_weights,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        topk=given_topk(objective, topk_ids, topk_rollout_log_probs),
    )
    layer = OutputLayer(VocabShard.of(logits.shape[-1], vocab_start, vocab_size, tp_group), temperature, True)
    responses = responses_of(objective, response_lengths, targets)
    return packed_policy_loss(
        logits, tokens, objective, layer, responses, inplace_backward=inplace_backward, debug=debug
    )


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


def responses_of(
    objective: Objective, lengths: Tensor | None, targets: Integer[Tensor, " T"]
) -> PackedResponses | None:
    """Return the responses of tokens that are all on this rank, if the objective reads responses."""
    if lengths is None or not objective.needs_responses:
        return None
    require_lengths(lengths, targets.numel(), objective.name)
    return PackedResponses(lengths.long())


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
