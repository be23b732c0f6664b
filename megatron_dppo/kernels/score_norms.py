"""Norms of each token's score by the hidden state before the output layer, a chunk of logits at a time.

The score d log pi(y) / dh = W^T (e_y - pi) / temperature is what every policy gradient of a token is a multiple
of: two losses with coefficients c and c' have gradients by the hidden states whose inner product is
sum_t c_t c'_t |score_t|^2. So one number per token compares any two of them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.loss import combine_statistics, require_shard, require_temperature
from megatron_dppo.kernels.output_layer import CHUNK_BYTES, OutputLayer
from megatron_dppo.kernels.products import wide_product
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.types import RolloutTokens

_ANY = Objective("any")  # whose rows hold the normaliser of the softmax, as every objective's do


@torch.no_grad()
def linear_score_norms(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss_mask: Tensor,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return |d log pi(target) / d hidden|, [T] float32 (float64 of float64); 0 outside the loss mask.

    Arguments and logits are as in `fused_linear_policy_loss`. In addition to the logits, this takes one more
    product with the weight. All tensor-parallel ranks get the same result.

    Raises:
        ConfigError: Hidden states and weight do not fit each other, or do not cover the vocabulary.
    """
    layer = OutputLayer.of(
        hidden,
        weight,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        temperature=temperature,
        chunk_bytes=chunk_bytes,
        logits_dtype=logits_dtype,
    )
    whole = layer.gathered(hidden)
    return _norms(layer, weight, targets, loss_mask, lambda which: layer.logits(whole[which], weight))


@torch.no_grad()
def score_norms(
    logits: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss_mask: Tensor,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return what `linear_score_norms` does, from the logits [T, V/tp] that the weight [V/tp, H] made."""
    require_temperature(temperature)
    shard = require_shard(logits, vocab_start, vocab_size, tp_group)
    rows = max(CHUNK_BYTES // max(logits.shape[1] * logits.itemsize, 1), 1)
    layer = OutputLayer(shard, temperature, logits.shape[0], rows, False, logits.dtype)
    return _norms(layer, weight, targets, loss_mask, lambda which: logits[which])


def _norms(
    layer: OutputLayer,
    weight: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    logits_of: Callable[[Tensor | slice], Tensor],
) -> Tensor:
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    norms = torch.zeros(layer.num_tokens, dtype=dtype, device=weight.device)
    for which in layer.chunks(loss_mask.bool()):
        logits, chosen = logits_of(which), targets[which]  # a copy: `which` are indices
        zeros = torch.zeros_like(chosen, dtype=dtype)
        tokens = RolloutTokens(targets=chosen, rollout_log_probs=zeros, advantages=zeros)
        rows, _ = combine_statistics(layer.statistics(logits, chosen, None), tokens, _ANY)
        rows[ROWS.index("log_prob_gradient")] = 1.0
        shard = layer.shard
        ops.logits_gradient_(
            logits, rows, chosen, None, None, shard.start, shard.vocab_size, layer.temperature, False
        )
        scores = logits.to(weight.dtype)
        by_hidden = wide_product(scores, weight) if weight.dtype == torch.bfloat16 else scores @ weight
        if layer.num_shards > 1:
            dist.all_reduce(by_hidden, group=shard.group)
        norms[which] = by_hidden.norm(dim=1)
    return norms
