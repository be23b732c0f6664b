"""Makes logits from hidden states chunk by chunk, and the norms of scores from these.

The score d log pi(y) / dh = W^T (e_y - pi) / temperature is what every policy gradient of a token is a multiple
of: two losses with coefficients c and c' have gradients by the hidden states whose inner product is
sum_t c_t c'_t |score_t|^2. So one number per token compares any two of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.algorithms.paper_rules import Unmasked
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.combine import combine_statistics
from megatron_dppo.kernels.loss import require_temperature, token_statistics
from megatron_dppo.kernels.ops import wide_product
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.kernels.shards import VocabShard, gather_statistics, require_shard
from megatron_dppo.types import RolloutTokens

CHUNK_BYTES = 2**30
"""Bytes of the logits that exist at once: about 3500 tokens of 152k columns in bfloat16."""


ROW_MULTIPLE = 128  # number of tokens in a chunk is a multiple of this, the tile size of matrix products
_ANY = Unmasked(name="any")  # whose rows hold the normaliser of the softmax, as every objective's do


@dataclass(frozen=True)
class OutputLayer:
    """The output layer of one micro-batch; methods that need its weight take it as an argument."""

    shard: VocabShard
    temperature: float
    num_tokens: int
    chunk_tokens: int
    is_sequence_parallel: bool
    logits_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        hidden: Float[Tensor, "rows H"],
        weight: Float[Tensor, "V H"],
        *,
        vocab_start: int,
        vocab_size: int | None,
        tp_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        temperature: float,
        chunk_bytes: int,
        logits_dtype: torch.dtype | None,
    ) -> "OutputLayer":
        """Return the layer for such tensors.

        Raises:
            ConfigError: Hidden states and weight do not fit each other, or do not cover the vocabulary.
        """
        if (
            hidden.dim() != 2
            or weight.dim() != 2
            or hidden.shape[1:] != weight.shape[1:]
            or hidden.dtype != weight.dtype
        ):
            found = f"hidden {list(hidden.shape)} {hidden.dtype}, weight {list(weight.shape)} {weight.dtype}"
            expected = "[T, H] and [V/tp, H] of one type"
            action = "Pass the output layer's input and weight."
            raise ConfigError(Problem("fused_linear_policy_loss", found, expected, action))
        dtype = hidden.dtype if logits_dtype is None else torch.promote_types(hidden.dtype, logits_dtype)
        columns = weight.shape[0]
        shard = require_shard(hidden.new_empty((0, columns), dtype=dtype), vocab_start, vocab_size, tp_group)
        require_temperature(temperature)
        num_shards = 1 if tp_group is None else tp_group.size()
        rows = chunk_bytes // max(columns * dtype.itemsize, 1)
        return cls(
            shard,
            temperature,
            num_tokens=hidden.shape[0] * (num_shards if sequence_parallel else 1),
            chunk_tokens=max(rows - rows % ROW_MULTIPLE or rows, 1),
            is_sequence_parallel=sequence_parallel and num_shards > 1,
            logits_dtype=dtype,
        )

    @property
    def num_shards(self) -> int:
        """The number of ranks that share the vocabulary."""
        return 1 if self.shard.group is None else self.shard.group.size()

    def chunks(self, loss_mask: Bool[Tensor, " T"] | None) -> Iterator[slice | Tensor]:
        """Yield the learning tokens in chunks; with a mask, this synchronises with the device once."""
        if loss_mask is None:
            for start in range(0, self.num_tokens, self.chunk_tokens):
                yield slice(start, min(start + self.chunk_tokens, self.num_tokens))
            return
        learning = loss_mask.nonzero()[:, 0]
        if learning.numel():
            yield from learning.split(self.chunk_tokens)

    def logits(self, hidden: Float[Tensor, "N H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "N V"]:
        """Return the logits of a chunk of tokens, [N, V/tp]."""
        if self.logits_dtype == hidden.dtype:
            return hidden @ weight.t()
        return wide_product(hidden, weight.t())

    def statistics(
        self,
        logits: Float[Tensor, "N V"],
        targets: Integer[Tensor, " N"],
        topk_ids: Integer[Tensor, "N K"] | None,
    ) -> Float[Tensor, "shards N 4+K"]:
        """Return the statistics of a chunk of learning tokens."""
        own = token_statistics(logits, targets, topk_ids, None, self.shard, self.temperature)
        return gather_statistics(own, self.shard.group)

    def gathered(self, hidden: Float[Tensor, "rows H"]) -> Float[Tensor, "T H"]:
        """Gather the hidden states of all tokens, [T, H]."""
        if not self.is_sequence_parallel:
            return hidden
        whole = hidden.new_empty(self.num_tokens, hidden.shape[1])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.shard.group)
        return whole

    def reduced(self, gradient: Float[Tensor, "T H"]) -> Float[Tensor, "rows H"]:
        """Return the gradient [T, H] by the hidden states, summed over shards: all tokens', or this rank's."""
        if self.num_shards == 1:
            return gradient
        if not self.is_sequence_parallel:
            dist.all_reduce(gradient, group=self.shard.group)
            return gradient
        own = gradient.new_empty(self.num_tokens // self.num_shards, gradient.shape[1])
        dist.reduce_scatter_tensor(own, gradient, group=self.shard.group)
        return own


@torch.no_grad()
def linear_score_norms(
    hidden: Float[Tensor, "rows H"],
    weight: Float[Tensor, "V H"],
    targets: Integer[Tensor, " T"],
    *,
    loss_mask: Bool[Tensor, " T"],
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    logits_dtype: torch.dtype | None = None,
) -> Float[Tensor, " T"]:
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
    logits: Float[Tensor, "T V"],
    weight: Float[Tensor, "V H"],
    targets: Integer[Tensor, " T"],
    *,
    loss_mask: Bool[Tensor, " T"],
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Float[Tensor, " T"]:
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
) -> Float[Tensor, " T"]:
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
