"""The fused losses of separate tensors; the trainer passes a micro-batch to the packed ones."""

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.responses import require_lengths
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels.linear import packed_linear_policy_loss
from megatron_dppo.kernels.loss import FusedPolicyLoss, packed_policy_loss
from megatron_dppo.kernels.output_layer import CHUNK_BYTES, OutputLayer
from megatron_dppo.kernels.shards import PackedResponses, VocabShard
from megatron_dppo.types import RolloutTokens, RolloutTopK


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
        topk=_given_topk(objective, topk_ids, topk_rollout_log_probs),
    )
    layer = OutputLayer(VocabShard.of(logits.shape[-1], vocab_start, vocab_size, tp_group), temperature, True)
    responses = _responses_of(objective, response_lengths, targets)
    return packed_policy_loss(
        logits, tokens, objective, layer, responses, inplace_backward=inplace_backward, debug=debug
    )


def fused_linear_policy_loss(
    hidden: Float[Tensor, "rows H"],
    weight: Float[Tensor, "V H"],
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
    sequence_parallel: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    logits_dtype: torch.dtype | None = None,
    debug: bool = False,
) -> FusedPolicyLoss:
    """Compute `fused_policy_loss` of the logits hidden @ weight.T, without ever storing all the logits.

    The weight's gradient is summed in a separate float32 buffer. If Megatron gave the weight a `main_grad`,
    the backward pass adds the buffer to it.

    Args:
        hidden: Equal on all ranks of `tp_group`, which sum its gradient; own rows if `sequence_parallel`.
        weight: [V/tp, H] of the output layer, in the type of `hidden`; this rank's rows.
        targets: [T]; arguments that are not explained are as for `fused_policy_loss`, for all T tokens.
        rollout_log_probs: [T].
        advantages: [T].
        objective: Objective to optimise.
        loss_mask: [T].
        token_weights: [T].
        topk_ids: [T, K], as for `fused_policy_loss`.
        topk_rollout_log_probs: [T, K].
        old_log_probs: [T].
        ref_log_probs: [T].
        response_lengths: [B]; rules that need them first take a pass over the logits for the log-probs.
        temperature: Divides the logits.
        vocab_start: Global id of the weight's first row.
        vocab_size: Vocabulary size of the model, without padding.
        tp_group: The ranks that hold the other rows of the weight.
        sequence_parallel: Whether the tokens of `hidden` are split over the ranks of `tp_group`.
        chunk_bytes: Bytes of the logits that exist at once.
        logits_dtype: float32 for logits that are not rounded to the type of `hidden`; `None` for that type.
        debug: Also check values, at the price of device synchronisations.

    Raises:
        ConfigError: `fused_policy_loss` refuses the inputs, or hidden states and weight do not fit each other.
    """
    tokens = RolloutTokens(
        targets=targets,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        token_weights=token_weights,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        topk=_given_topk(objective, topk_ids, topk_rollout_log_probs),
    )
    shard = VocabShard.of(weight.shape[0], vocab_start, vocab_size, tp_group)
    layer = OutputLayer(
        shard,
        temperature,
        is_sequence_parallel=sequence_parallel,
        chunk_bytes=chunk_bytes,
        logits_dtype=logits_dtype,
    )
    responses = _responses_of(objective, response_lengths, targets)
    return packed_linear_policy_loss(hidden, weight, tokens, objective, layer, responses, debug=debug)


def _given_topk(
    objective: Objective,
    ids: Integer[Tensor, "T K"] | None,
    rollout_log_probs: Float[Tensor, "T K"] | None,
) -> RolloutTopK | None:
    """Return the Top-K of the public losses' arguments; log-probs of one only reported may be absent."""
    if objective.needs_topk:
        given = {"topk_ids": ids, "topk_rollout_log_probs": rollout_log_probs}
        why = f"a tensor, because the divergence is {objective.divergence}"
        absent = [name for name, values in given.items() if values is None]
        if absent:
            raise ConfigError(
                [Problem(f"fused_policy_loss.{name}", "none", why, f"Pass {name}=...") for name in absent]
            )
    if ids is None:
        return None
    if rollout_log_probs is None:
        rollout_log_probs = torch.zeros_like(ids, dtype=torch.float32)
    return RolloutTopK(ids, rollout_log_probs)


def _responses_of(
    objective: Objective, lengths: Tensor | None, targets: Integer[Tensor, " T"]
) -> PackedResponses | None:
    """Return the responses of tokens that are all on this rank, if the objective reads responses."""
    if lengths is None or not objective.needs_responses:
        return None
    require_lengths(lengths, targets.numel(), objective.name)
    return PackedResponses(lengths.long())
