"""Causal attention over packed sequences: what attends to what, on GPUs without padding, else padded."""

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from megatron_dppo.data.batches.packing import zigzag
from megatron_dppo.data.batches.prefixes import RepeatedRows

# torch 2.11 has no `enable_gqa`: it passes fewer key-value heads to the same kernel unasked.
_GROUPED_HEADS: dict[str, Any] = (
    dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class Spans:
    """Consecutive queries of this rank, and the keys that the last of each span sees; on the host.

    Causal masks align the last query of a span with its last key.
    """

    num_queries: Tensor  # [P] int64 of each span
    num_keys: Tensor  # [P] int64, at least as many
    keys: RepeatedRows | None = None  # row of each key, span by span; None: the keys in their order, each once

    @classmethod
    def of_sequences(cls, cu_seqlens: Tensor) -> "Spans":
        """Return complete sequences on one rank, for `cu_seqlens` [S+1]."""
        lengths = cu_seqlens.diff().long()
        return cls(lengths, lengths)

    @classmethod
    def of_pieces(cls, cu_seqlens: Tensor, rank: int, size: int) -> "Spans":
        """Return a context-parallel rank's two pieces of each sequence, with the keys that all ranks gather.

        Keys that both pieces see are stored twice: `size + 1/2` keys for each of the rank's tokens, although
        only `size` are gathered.

        Args:
            cu_seqlens: [S+1] int32, first token of each sequence, and T. Lengths are multiples of `2 * size`.
            rank: Index of this rank in its context-parallel group.
            size: Number of ranks in that group.
        """
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        gathered = torch.cat([zigzag(starts, lengths, each, size) for each in range(size)])
        row_of = torch.empty_like(gathered).index_copy_(0, gathered, torch.arange(len(gathered)))
        pieces = lengths.new_tensor([rank + 1, 2 * size - rank])
        num_keys = (lengths[:, None] // (2 * size) * pieces).flatten()
        ends = num_keys.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - num_keys).repeat_interleave(num_keys)
        rows = row_of[starts.repeat_interleave(2).repeat_interleave(num_keys) + within]
        num_queries = (lengths // (2 * size)).repeat_interleave(2)
        return cls(num_queries, num_keys, RepeatedRows.of(rows, len(gathered)))


def starts_of(lengths: Tensor) -> Tensor:
    """[P] -> [P+1] int32: first row of each, and the number of rows."""
    ends = lengths.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


@dataclass(frozen=True)
class VarlenSequences:
    """The spans of a micro-batch for PyTorch's flash attention without padding, `varlen_attn`.

    Flash attention takes concatenated sequences, with the first row of each. If a sequence has more keys than
    queries, its causal mask aligns the last query with the last key ("bottom-right", see its
    `mask.h`): query i of n sees the keys up to `num_keys - n + i`.

    Spans with more keys than queries need nothing else: each is a separate sequence for the kernel. So one call
    computes them without a mask, and without reordering queries. The keys of a span must be contiguous:
    `seqused_k`, which would let spans share keys, is refused if gradients are needed. Keys that several spans
    see are stored once for each of them.
    """

    cu_seqlens_q: Tensor  # [P+1] int32 first query of each, and the number of queries
    cu_seqlens_k: Tensor  # [P+1] int32 first key of each, and the number of keys
    max_q: int
    max_k: int
    keys: RepeatedRows | None  # None: the keys in their order, each once

    @classmethod
    def of(cls, spans: Spans) -> "VarlenSequences":
        """Return the spans as sequences of the kernel, on the host."""
        return cls(
            starts_of(spans.num_queries),
            starts_of(spans.num_keys),
            int(spans.num_queries.max()),
            int(spans.num_keys.max()),
            spans.keys,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention inside each of the packed sequences.

        Args:
            query: [T', heads, D], float16 or bfloat16 on a GPU.
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
        head_dim, value_head_dim = query.shape[-1], value.shape[-1]
        if head_dim != value_head_dim:  # the kernel supports one size: zeros change no score and no sum
            scale = head_dim**-0.5 if scale is None else scale
            query, key, value = (
                F.pad(x, (0, max(head_dim, value_head_dim) - x.shape[-1])) for x in (query, key, value)
            )
        places = (self.cu_seqlens_q, self.cu_seqlens_k, self.max_q, self.max_k)
        causal: Any = dict(window_size=(-1 if window is None else window - 1, 0), scale=scale)
        # The backward pass adds the gradients of queries in any order, unless PyTorch is deterministic.
        if sinks is None:
            attended = varlen_attn(query, key, value, *places, **causal, **_GROUPED_HEADS)
        else:
            attended = _AttentionWithSinks.apply(query, key, value, sinks, places, causal)
        return cast(Tensor, attended)[..., :value_head_dim]


class _AttentionWithSinks(torch.autograd.Function):
    """Flash attention with a sink of each head.

    The kernel has no attention sinks. A sink adds exp(sink) to the sum that divides a query's result, so the
    result is scaled by sigmoid(log-sum-exp - sink). The kernel's log-sum-exp has no gradient, but its backward
    pass takes it as an argument, to compute probabilities, and the result, to multiply it with its gradient.
    Given the scaled result and the log-sum-exp with the sink, it returns the gradients of attention with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        places: tuple[Tensor, Tensor, int, int],
        causal: dict[str, Any],
    ) -> Tensor:
        options: Any = causal | _GROUPED_HEADS
        options["return_aux"] = AuxRequest(lse=True)
        plain, statistics = varlen_attn(query, key, value, *places, **options)
        assert statistics.shape == (query.shape[1], query.shape[0]), "[heads, T']"
        own = sinks.to(statistics)[:, None]
        with_sinks = torch.logaddexp(statistics, own)
        result = (plain * (statistics - with_sinks).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, with_sinks, *places[:2])
        ctx.longest, ctx.causal = places[2:], causal
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, with_sinks, *starts = ctx.saved_tensors
        gradient, window = gradients[0].contiguous(), list(ctx.causal["window_size"])
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            *(gradient, query, key, value, result, with_sinks, *starts, *ctx.longest),
            window == [-1, 0],
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # of no dropout
            ctx.causal["scale"],
            window,
        )
        shares = (sinks.to(with_sinks)[:, None] - with_sinks).exp()  # [heads, T']
        products = (gradient.to(shares) * result.to(shares)).sum(-1).T
        return *of_inputs, -(shares * products).sum(-1).to(sinks.dtype), None, None


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
    """The spans of a micro-batch in padded batches, for PyTorch's scaled dot product.

    Spans with similar numbers of queries and keys share one batch, so the work is at most four times the
    minimum. The batches are concatenated. This contains everything that depends only on the numbers of queries
    and keys. It is built once for a micro-batch, on the host.
    """

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
