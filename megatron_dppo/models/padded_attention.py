"""Causal attention over packed sequences in padded batches, by PyTorch's scaled dot product.

Spans with similar numbers of queries and keys share one batch, so the work is at most four times the minimum. A
`PaddedBatches` contains everything that depends only on these numbers. It is built once for a micro-batch, on
the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.data.batches.prefixes import RepeatedRows
from megatron_dppo.models.spans import Spans


@dataclass(frozen=True)
class Batch:
    """Spans of similar length, padded to the longest of them."""

    num_spans: int
    num_queries: int  # of each
    num_keys: int  # of each
    places: Tensor | None
    """[spans, 1, queries, 1] int64 place of each query among its keys; None if there are as many of both."""


@dataclass(frozen=True)
class PaddedBatches:
    """Positions of a micro-batch's tokens in its padded batches, which are concatenated."""

    batches: tuple[Batch, ...]
    query_rows: Tensor  # [T'] int64 of this rank's queries
    key_rows: Tensor  # [K] int64 of all spans' keys
    keys: RepeatedRows | None  # None: the keys in their order, each once
    columns: Tensor  # [longest] int64, from 0

    @classmethod
    def of(cls, spans: Spans) -> "PaddedBatches":
        """Return the batches of the spans, on the host."""
        sizes = torch.stack([spans.num_queries, spans.num_keys], dim=1)  # [P, 2]
        kinds, kind_of_span = torch.ceil(torch.log2(sizes.double())).unique(dim=0, return_inverse=True)
        first = torch.zeros_like(sizes)  # rows of each span's first query and first key
        shapes, num_rows = list[tuple[int, int, int]](), sizes.new_zeros(2)
        for kind in range(len(kinds)):
            members = (kind_of_span == kind).nonzero()[:, 0]
            widths = sizes[members].amax(0)
            first[members] = num_rows + torch.arange(len(members))[:, None] * widths
            num_rows = num_rows + len(members) * widths
            shapes.append((len(members), *widths.tolist()))
        query_rows, key_rows = (_rows(*column) for column in zip(first.T, sizes.T, strict=True))
        places = _within(spans.num_queries) + (sizes[:, 1] - sizes[:, 0]).repeat_interleave(sizes[:, 0])
        padded = places.new_zeros(int(num_rows[0])).index_copy(0, query_rows, places)
        parts = padded.split([num * queries for num, queries, _ in shapes])
        is_square = [bool((sizes[kind_of_span == kind].diff() == 0).all()) for kind in range(len(kinds))]
        batches = tuple(
            Batch(*shape, None if square else part.view(shape[0], 1, -1, 1))
            for shape, part, square in zip(shapes, parts, is_square, strict=True)
        )
        longest = torch.arange(max(batch.num_keys for batch in batches))
        return cls(batches, query_rows, key_rows, spans.keys, longest)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of each span's queries to its keys.

        Args:
            query: [T', heads, D].
            key: [T, key-value heads, D], in the order in which context-parallel ranks gather them.
            value: [T, key-value heads, D of values], likewise.
            scale: Factor on the scores; `None` means 1/sqrt(D).
            window: Most keys that a query sees, its own included; `None` means all.
            sinks: [heads] score of a further key of each head, which has no value; `None` means no such key.

        Returns:
            [T', heads, D of values].
        """
        if self.keys is not None:
            key, value = self.keys.take(key), self.keys.take(value)
        sizes = [batch.num_spans * batch.num_keys for batch in self.batches]
        own_sizes = [batch.num_spans * batch.num_queries for batch in self.batches]
        queries = _Padded.apply(query, self.query_rows, sum(own_sizes)).split(own_sizes)
        keys, values = (_Padded.apply(x, self.key_rows, sum(sizes)).split(sizes) for x in (key, value))
        attended = [
            self._attend(batch, (q, k, v), scale, window, sinks)
            for batch, q, k, v in zip(self.batches, queries, keys, values, strict=True)
        ]
        return _Unpadded.apply(torch.cat(attended), self.query_rows)

    def _attend(
        self,
        batch: Batch,
        inputs: tuple[Tensor, Tensor, Tensor],
        scale: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute the attention of one padded batch, [spans * width, heads, D] each."""
        q, k, v = (x.view(batch.num_spans, -1, *x.shape[1:]).transpose(1, 2) for x in inputs)
        is_seen = self._seen(batch, window, is_needed=sinks is not None)
        if sinks is not None:
            factor = q.shape[-1] ** -0.5 if scale is None else scale
            q, k, v = _with_sinks(q, k, v, sinks / factor)
            assert is_seen is not None
            is_seen, scale = F.pad(is_seen, (1, 0), value=True), factor
        options: dict[str, Any] = dict(attn_mask=is_seen, is_causal=is_seen is None, scale=scale)
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return attended.transpose(1, 2).flatten(0, 1)

    def _seen(self, batch: Batch, window: int | None, *, is_needed: bool) -> Tensor | None:
        """Return whether queries see keys, [spans or 1, 1, queries, keys] bool; None for a plain mask."""
        if batch.places is None and window is None and not is_needed:
            return None
        columns = self.columns[: batch.num_keys]
        places = columns.view(1, 1, -1, 1) if batch.places is None else batch.places
        is_seen = columns <= places
        return is_seen if window is None else is_seen & (columns > places - window)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key without a value first, whose product with each query is the head's sink: one more column."""
    of_heads = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:-1], 1)
    first = F.pad(torch.zeros_like(key[:, :, :1]), (0, 1), value=1.0)
    keys = torch.cat([first, F.pad(key, (0, 1))], dim=2)
    return torch.cat([query, of_heads], dim=-1), keys, F.pad(value, (0, 0, 1, 0))


def _within(lengths: Tensor) -> Tensor:
    """Return the index of each row in its span, [rows]."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def _rows(first: Tensor, lengths: Tensor) -> Tensor:
    """Return the padded rows of all spans, whose first rows these are, [rows]."""
    return first.repeat_interleave(lengths) + _within(lengths)


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
