"""Log-probs, entropies and norms of scores, without gradient.

The score d log pi(y) / dh = W^T (e_y - pi) / temperature is what every policy gradient of a token is a multiple
of: two losses with coefficients c and c' have gradients by the hidden states whose inner product is
sum_t c_t c'_t |score_t|^2. So one number per token compares any two of them.
"""

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.algorithms.paper_rules import Unmasked
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.combine import combine_statistics
from megatron_dppo.kernels.ops import wide_product
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import ROWS, STATISTICS, TokenLogProbs, log_probs_of, wide_dtype
from megatron_dppo.types import RolloutTokens

_ANY = Unmasked(name="any")  # whose rows hold the normaliser of the softmax, as every objective's do


@torch.no_grad()
def token_log_probs(
    output: Float[Tensor, "rows columns"],
    weight: Float[Tensor, "V H"] | None,
    targets: Integer[Tensor, " T"],
    layer: OutputLayer,
    *,
    loss_mask: Bool[Tensor, " T"] | None = None,
    topk_ids: Integer[Tensor, "T K"] | None = None,
) -> TokenLogProbs:
    """Compute log-probs and entropies of the policy whose model has this output, without gradient.

    Args:
        output: Logits or hidden states, by `layer.is_applied`.
        weight: Output layer's weight; not read if the output is logits.
        targets: [T], as for `fused_policy_loss`.
        layer: What the output layer is.
        loss_mask: [T], as for `fused_policy_loss`.
        topk_ids: [T, K], as for `fused_policy_loss`.

    Raises:
        ConfigError: Output and weight do not fit each other, or do not cover the vocabulary.
    """
    layer.require(output, weight)
    ids = None if topk_ids is None else topk_ids.to(torch.int32).contiguous()
    if layer.is_applied:
        statistics = layer.statistics(output, targets, ids, loss_mask)
    else:
        assert weight is not None, "`require` has seen it"
        statistics = all_statistics(output, weight, layer, targets, loss_mask, ids)
    return log_probs_of(statistics, ids, loss_mask)


@torch.no_grad()
def all_statistics(
    hidden: Tensor,
    weight: Tensor,
    layer: OutputLayer,
    targets: Tensor,
    loss_mask: Tensor | None,
    topk_ids: Tensor | None,
) -> Tensor:
    """Compute the statistics of all tokens, [shards, T, 4+K], chunk by chunk; 0 outside the loss mask."""
    width = STATISTICS + (0 if topk_ids is None else topk_ids.shape[1])
    whole = layer.gathered(hidden)
    shape = (layer.shard.num_ranks, whole.shape[0], width)
    statistics = torch.zeros(shape, dtype=wide_dtype(hidden), device=hidden.device)
    for which in layer.chunks(weight, whole.shape[0], loss_mask):
        logits = layer.logits(whole[which], weight)
        ids = None if topk_ids is None else topk_ids[which]
        statistics[:, which] = layer.statistics(logits, targets[which], ids)
    return statistics


@torch.no_grad()
def score_norms(
    output: Float[Tensor, "rows columns"],
    weight: Float[Tensor, "V H"],
    targets: Integer[Tensor, " T"],
    layer: OutputLayer,
    *,
    loss_mask: Bool[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """Return |d log pi(target) / d hidden|, [T] float32 (float64 of float64); 0 outside the loss mask.

    Arguments are as for `token_log_probs`. In addition to the logits, this takes one more product with the
    weight. All tensor-parallel ranks get the same result.

    Raises:
        ConfigError: Output and weight do not fit each other, or do not cover the vocabulary.
    """
    layer.require(output, weight)
    whole = layer.gathered(output)
    dtype = wide_dtype(weight)
    norms = torch.zeros(targets.numel(), dtype=dtype, device=weight.device)
    for which in layer.chunks(weight, targets.numel(), loss_mask.bool()):
        logits, chosen = layer.logits(whole[which], weight), targets[which]  # copies: `which` are indices
        zeros = torch.zeros_like(chosen, dtype=dtype)
        tokens = RolloutTokens(targets=chosen, rollout_log_probs=zeros, advantages=zeros)
        rows, _ = combine_statistics(layer.statistics(logits, chosen, None), tokens, _ANY)
        rows[ROWS.index("log_prob_gradient")] = 1.0
        ops.logits_gradient_(logits, rows, chosen, None, None, *layer.settings(with_entropy=False))
        scores = logits.to(weight.dtype)
        by_hidden = wide_product(scores, weight) if weight.dtype == torch.bfloat16 else scores @ weight
        if layer.shard.num_ranks > 1:
            dist.all_reduce(by_hidden, group=layer.shard.group)
        norms[which] = by_hidden.norm(dim=1)
    return norms
