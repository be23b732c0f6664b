"""Causal attention over packed sequences in padded batches, by PyTorch's scaled dot product.

Sequences of similar length share one batch, so the work is at most four times the minimum. A `PaddedBatches`
contains everything that depends only on the lengths. It is built once for a micro-batch, on the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.data.batches.packing import zigzag


@dataclass(frozen=True)
class Batch:
    """Sequences of similar length, padded to the longest of them."""

    num_sequences: int
    width: int  # keys of each
    own_width: int  # queries of each
    places: (
        Tensor | None
    )  # [sequences, 1, own_width, 1] int64 position of each query in its sequence; None if all are in order


@dataclass(frozen=True)
class PaddedBatches:
    """Positions of a micro-batch's tokens in its padded batches, which are concatenated."""

    batches: tuple[Batch, ...]
    rows: Tensor  # [T] int64 of all keys, in the order in which context-parallel ranks gather them
    own_rows: Tensor  # [T'] int64 of this rank's queries
    columns: Tensor  # [longest] int64, from 0

    @classmethod
    def of(cls, cu_seqlens: Tensor, rank: int = 0, size: int = 1) -> "PaddedBatches":
        """Return the batches of packed sequences.

        Args:
            cu_seqlens: [S+1] int32 on the host, first token of each sequence, and T.
            rank: Index of this rank in its context-parallel group, which decides its queries.
            size: Number of ranks in that group.
        """
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        kinds = torch.ceil(torch.log2(lengths.double().clamp(min=1))).long()
        first, own_first = torch.zeros_like(lengths), torch.zeros_like(lengths)  # row of each sequence
        shapes: list[tuple[int, int]] = []
        for kind in kinds.unique():
            members = (kinds == kind).nonzero()[:, 0]
            width, count = int(lengths[members].max()), torch.arange(len(members))
            num_rows = sum(num * wide for num, wide in shapes)
            first[members] = num_rows + count * width
            own_first[members] = num_rows // size + count * (width // size)
            shapes.append((len(members), width))
        gathered = torch.cat([zigzag(starts, lengths, each, size) for each in range(size)])
        place = torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(lengths)
        rows = first.repeat_interleave(lengths) + place
        own_lengths = lengths // size
        within = torch.arange(int(own_lengths.sum()))
        within -= (own_lengths.cumsum(0) - own_lengths).repeat_interleave(own_lengths)
        own_rows = own_first.repeat_interleave(own_lengths) + within
        own_places = place[zigzag(starts, lengths, rank, size)]
        return cls(
            _batches(shapes, size, own_rows, own_places if size > 1 else None),
            rows[gathered],
            own_rows,
            torch.arange(max(width for _, width in shapes)),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute causal attention inside each of the packed sequences.

        Args:
            query: [T', heads, D].
            key: [T, key-value heads, D], in the order in which context-parallel ranks gather them.
            value: [T, key-value heads, D of values], likewise.
            scale: Factor on the scores; `None` means 1/sqrt(D).

        Returns:
            [T', heads, D of values].
        """
        sizes = [batch.num_sequences * batch.width for batch in self.batches]
        own_sizes = [batch.num_sequences * batch.own_width for batch in self.batches]
        queries = _Padded.apply(query, self.own_rows, sum(own_sizes)).split(own_sizes)
        keys, values = (_Padded.apply(x, self.rows, sum(sizes)).split(sizes) for x in (key, value))
        attended = [
            self._attend(batch, q, k, v, scale)
            for batch, q, k, v in zip(self.batches, queries, keys, values, strict=True)
        ]
        return _Unpadded.apply(torch.cat(attended), self.own_rows)

    def _attend(self, batch: Batch, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of one padded batch, [sequences * width, heads, D] each."""
        q, k, v = (x.view(batch.num_sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        is_seen = None if batch.places is None else self.columns[: batch.width] <= batch.places
        options: dict[str, Any] = dict(attn_mask=is_seen, is_causal=is_seen is None, scale=scale)
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return attended.transpose(1, 2).flatten(0, 1)


def _batches(
    shapes: list[tuple[int, int]], size: int, own_rows: Tensor, own_places: Tensor | None
) -> tuple[Batch, ...]:
    """Return the batches of (sequences, width), with the positions of queries if ranks share a sequence."""
    if own_places is None:
        return tuple(Batch(num, width, width, None) for num, width in shapes)
    own = [(num, width // size) for num, width in shapes]
    padded = own_places.new_zeros(sum(num * width for num, width in own)).index_copy(0, own_rows, own_places)
    places = padded.split([num * width for num, width in own])
    return tuple(
        Batch(num, width, width // size, each.view(num, 1, -1, 1))
        for (num, width), each in zip(shapes, places, strict=True)
    )


class _Padded(torch.autograd.Function):
    """[T, ...] -> [rows, ...]: each token in its row, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0].index_select(0, rows), None, None


class _Unpadded(torch.autograd.Function):
    """[rows, ...] -> [T, ...]: each token from its row."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = padded.shape[0]
        return padded.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,), gradient = ctx.saved_tensors, gradients[0]
        return gradient.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_copy_(0, rows, gradient), None
