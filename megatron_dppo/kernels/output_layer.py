"""The output layer as a loss needs it; it makes logits from hidden states chunk by chunk."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.ops import wide_product
from megatron_dppo.kernels.shards import VocabShard, gather_statistics, require_shard

CHUNK_BYTES = 2**30
"""Bytes of the logits that exist at once: about 3500 tokens of 152k columns in bfloat16."""


ROW_MULTIPLE = 128  # number of tokens in a chunk is a multiple of this, the tile size of matrix products


@dataclass(frozen=True)
class OutputLayer:
    """What the output layer of a model is to a loss; methods that need its weight take it as an argument.

    The output of the model is hidden states, or logits, of which only the shard and the temperature are read.
    """

    shard: VocabShard  # columns of this rank
    temperature: float = 1.0  # divides the logits
    is_applied: bool = False  # the output of the model is logits
    is_sequence_parallel: bool = False  # the tokens of hidden states are split over the shard's group
    chunk_bytes: int = CHUNK_BYTES  # of the logits that exist at once, if they are made from hidden states
    logits_dtype: torch.dtype | None = None  # float32 if they are not rounded to the hidden states' type

    def require(self, output: Float[Tensor, "rows columns"], weight: Float[Tensor, "V H"] | None) -> None:
        """Refuse logits that are not this rank's, or hidden states and a weight that do not make these."""
        logits = output
        if not self.is_applied:
            assert weight is not None, "hidden states need the weight"
            is_matrix = output.dim() == 2 == weight.dim()
            if not is_matrix or output.shape[1:] != weight.shape[1:] or output.dtype != weight.dtype:
                found = (
                    f"hidden {list(output.shape)} {output.dtype}, weight {list(weight.shape)} {weight.dtype}"
                )
                expected = "[T, H] and [V/tp, H] of one type"
                action = "Pass the output layer's input and weight."
                raise ConfigError(Problem("fused_linear_policy_loss", found, expected, action))
            logits = output.new_empty((0, weight.shape[0]), dtype=self._dtype_of(output))
        require_shard(logits, self.shard)
        if not 0 < self.temperature < float("inf"):
            found, action = repr(self.temperature), "Pass the temperature that the rollout sampled with."
            raise ConfigError(Problem("fused_policy_loss.temperature", found, "a finite number > 0", action))

    def _dtype_of(self, hidden: Tensor) -> torch.dtype:
        return torch.promote_types(hidden.dtype, self.logits_dtype or hidden.dtype)

    def num_tokens(self, hidden: Float[Tensor, "rows H"]) -> int:
        """Return T, the number of tokens on all ranks."""
        return hidden.shape[0] * (self.shard.num_ranks if self.is_sequence_parallel else 1)

    def chunk_tokens(self, weight: Float[Tensor, "V H"]) -> int:
        """Return the number of tokens whose logits exist at once."""
        rows = self.chunk_bytes // max(weight.shape[0] * self._dtype_of(weight).itemsize, 1)
        return max(rows - rows % ROW_MULTIPLE or rows, 1)

    def chunks(
        self, weight: Float[Tensor, "V H"], num_tokens: int, loss_mask: Bool[Tensor, " T"] | None
    ) -> Iterator[slice | Tensor]:
        """Yield the learning tokens in chunks; with a mask, this synchronises with the device once."""
        size = self.chunk_tokens(weight)
        if loss_mask is None:
            for start in range(0, num_tokens, size):
                yield slice(start, min(start + size, num_tokens))
            return
        learning = loss_mask.nonzero()[:, 0]
        if learning.numel():
            yield from learning.split(size)

    def logits(self, hidden: Float[Tensor, "N H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "N V"]:
        """Return the logits [N, V/tp] of a chunk of tokens, from their hidden states or logits."""
        if self.is_applied:
            return hidden
        if self._dtype_of(hidden) == hidden.dtype:
            return hidden @ weight.t()
        return wide_product(hidden, weight.t())

    def settings(self, *, with_entropy: bool) -> tuple[int, int, float, bool]:
        """Return what the operators on logits take after their tensors."""
        return self.shard.start, self.shard.vocab_size, self.temperature, with_entropy

    def statistics(
        self,
        logits: Float[Tensor, "N V"],
        targets: Integer[Tensor, " N"],
        topk_ids: Integer[Tensor, "N K"] | None,
        is_learning: Bool[Tensor, " N"] | None = None,
    ) -> Float[Tensor, "shards N 4+K"]:
        """Return the statistics of the tokens over all shards; see `reference.row_statistics`."""
        settings = self.settings(with_entropy=True)
        own = ops.row_statistics(logits.detach(), targets, topk_ids, is_learning, *settings)
        return gather_statistics(own, self.shard.group)

    def gathered(self, hidden: Float[Tensor, "rows H"]) -> Float[Tensor, "T H"]:
        """Gather the hidden states of all tokens, [T, H]."""
        if self.shard.num_ranks == 1 or not self.is_sequence_parallel:
            return hidden
        whole = hidden.new_empty(self.num_tokens(hidden), hidden.shape[1])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.shard.group)
        return whole

    def reduced(self, gradient: Float[Tensor, "T H"]) -> Float[Tensor, "rows H"]:
        """Return the gradient [T, H] by the hidden states, summed over shards: all tokens', or this rank's."""
        num_ranks = self.shard.num_ranks
        if num_ranks == 1:
            return gradient
        if not self.is_sequence_parallel:
            dist.all_reduce(gradient, group=self.shard.group)
            return gradient
        own = gradient.new_empty(gradient.shape[0] // num_ranks, gradient.shape[1])
        dist.reduce_scatter_tensor(own, gradient, group=self.shard.group)
        return own
