"""Selects the tokens of a packed micro-batch that a rank forwards under context and sequence parallelism.

Sequences are padded if the layout requires it. Each context-parallel rank then takes two pieces of every
sequence, one from its front and one from its back ("zig-zag"). Causal attention then costs all ranks the same.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_dppo.types import Microbatch, each_token


@dataclass(frozen=True, eq=False)
class TokenSlice:
    """The tokens of one context-parallel rank. Padded positions count from 0 over the padded micro-batch."""

    padded_cu_seqlens: Tensor  # [S+1] int32 of the padded sequences
    padded_position: Tensor  # [T] int64: position of each token of the micro-batch after padding
    own: Tensor  # [T'] int64: padded positions of this rank's tokens, in its order

    @cached_property
    def source(self) -> Tensor:
        """[T'] int64: index of each of this rank's tokens in the micro-batch; -1 for padding."""
        sources = self.own.new_full((int(self.padded_cu_seqlens[-1]),), -1)
        sources[self.padded_position] = torch.arange(self.padded_position.numel(), device=sources.device)
        return sources[self.own]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all tokens, and nothing is padded."""
        return self.own.numel() == self.padded_position.numel() == int(self.padded_cu_seqlens[-1])

    def local(self, microbatch: Microbatch) -> Microbatch:
        """Return this rank's tokens as a micro-batch with the `cu_seqlens` of the complete padded micro-batch.

        Padding tokens are masked in the loss and routed like the last token of the micro-batch. They follow
        their sequence, so causal attention never sees them. If the rank has all tokens and there is no padding,
        the same micro-batch is returned.
        """
        if self.is_whole:
            return microbatch
        is_padding = self.source < 0
        source, padding = self.source.clamp(min=0), is_padding.nonzero()[:, 0]

        def take(values: Tensor, fill: float) -> Tensor:
            return values.index_select(0, source).index_fill_(0, padding, fill)

        starts = self.padded_cu_seqlens[:-1].long().repeat_interleave(self.padded_cu_seqlens.diff().long())
        routes = microbatch.routed_experts
        if routes is not None:
            last = routes.indices.shape[0] - 1
            rows = torch.where(is_padding, last, source)
            routes = replace(routes, indices=routes.indices.index_select(0, rows))
        return replace(
            each_token(microbatch, take),
            position_ids=self.own - starts[self.own],
            cu_seqlens=self.padded_cu_seqlens,
            routed_experts=routes,
        )

    def scattered(self, values: Tensor) -> Tensor:
        """Scatter [T', ...] values of this rank's tokens to [T, ...] of the micro-batch, 0 elsewhere."""
        is_token = self.source >= 0
        spread = values.new_zeros((self.padded_position.numel(), *values.shape[1:]))
        return spread.index_copy(0, self.source[is_token], values[is_token])


def token_slice(microbatch: Microbatch, rank: int, context: int, tensor: int) -> TokenSlice:
    """Return the tokens of context-parallel rank `rank`.

    Args:
        microbatch: The complete micro-batch.
        rank: Index of this rank in its context-parallel group.
        context: Size of the context-parallel group. Above 1, sequences are padded to multiples of twice this
            size.
        tensor: Size of the tensor-parallel group, which splits T' further for sequence parallelism.
    """
    lengths = microbatch.cu_seqlens.diff().long()
    unit = 2 * context if context > 1 else 1
    padded = -(-lengths // unit) * unit
    whole = math.lcm(unit, tensor * context)
    padded[-1] += -int(padded.sum()) % whole
    starts = microbatch.cu_seqlens[:-1].long()
    padded_ends = padded.cumsum(0)
    padded_starts = padded_ends - padded
    tokens = torch.arange(microbatch.tokens.numel(), device=lengths.device)
    position = tokens + (padded_starts - starts).repeat_interleave(lengths)
    return TokenSlice(
        padded_cu_seqlens=torch.cat([padded_ends.new_zeros(1), padded_ends]).to(torch.int32),
        padded_position=position,
        own=zigzag(padded_starts, padded, rank, context),
    )


def zigzag(starts: Tensor, lengths: Tensor, rank: int, size: int) -> Tensor:
    """Return [T/size] int64 positions of a rank's two pieces of each sequence, sequence by sequence.

    Args:
        starts: [S] int64 first position of each sequence.
        lengths: [S] int64, multiples of `2 * size`, or any lengths if `size` is 1.
        rank: Index of the rank. It has piece `rank` from the front and piece `rank` from the back.
        size: Size of the context-parallel group.
    """
    if size == 1:
        return torch.arange(int(lengths.sum()), device=starts.device)
    piece = lengths // (2 * size)
    first = torch.stack([starts + rank * piece, starts + (2 * size - 1 - rank) * piece], dim=1).flatten()
    lengths = piece.repeat_interleave(2)
    ends = lengths.cumsum(0)
    within = torch.arange(int(ends[-1]), device=starts.device) - (ends - lengths).repeat_interleave(lengths)
    return first.repeat_interleave(lengths) + within
