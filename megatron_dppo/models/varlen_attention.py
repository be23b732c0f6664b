"""Causal attention over packed sequences without padding, by PyTorch's flash attention (`varlen_attn`).

Flash attention takes concatenated sequences, with the first row of each. If a sequence has more keys than
queries, its causal mask aligns the last query with the last key ("bottom-right", see its
`mask.h`): query i of n sees the keys up to `num_keys - n + i`.

Context parallelism needs nothing else. A rank has two pieces of each sequence, one from its front and
one from its back, and a piece attends to the keys from the sequence's start to the piece's end. So each piece
is a separate sequence for the kernel: one call, no mask, and no reordering of queries. The keys of a piece
must be contiguous: `seqused_k`, which would let pieces share keys, is refused if gradients are needed. Keys
that both pieces see are therefore stored twice: `size + 1/2` keys for each of the rank's tokens, although only
`size` are gathered.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_dppo.data.batches.packing import zigzag

# torch 2.11 has no `enable_gqa`: it passes fewer key-value heads to the same kernel unasked.
_GROUPED_HEADS = dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class PieceKeys:
    """Indices of the keys of a context-parallel rank's pieces, among the keys that all ranks gather.

    Backward adds the two gradients of a key that two pieces see, always in the same order: no atomic addition.
    """

    rows: Tensor  # [K] int64 gathered row of each key, piece by piece
    seen: Tensor  # [N] int64 gathered row of each key that any piece sees; keys of front pieces come first
    back: Tensor  # [N] int64 place in `rows` of each of `seen`, in a back piece
    front: Tensor  # [M] int64 place in `rows` of the first M of `seen`, in a front piece

    @classmethod
    def of(cls, cu_seqlens: Tensor, rank: int, size: int) -> "PieceKeys":
        """Return the keys of a rank's pieces, on the host; arguments are as for `VarlenSequences.of`."""
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        gathered = torch.cat([zigzag(starts, lengths, each, size) for each in range(size)])
        row_of = torch.empty_like(gathered).index_copy_(0, gathered, torch.arange(len(gathered)))
        num_keys = _num_keys(lengths, rank, size)
        ends = num_keys.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - num_keys).repeat_interleave(num_keys)
        rows = row_of[starts.repeat_interleave(2).repeat_interleave(num_keys) + within]
        is_front = torch.arange(2).eq(0).repeat(len(starts)).repeat_interleave(num_keys)
        is_shared = ~is_front & (within < num_keys[::2].repeat_interleave(2).repeat_interleave(num_keys))
        places = [part.nonzero()[:, 0] for part in (is_shared, ~is_front & ~is_shared, is_front)]
        back = torch.cat(places[:2])
        return cls(rows, rows[back], back, places[2])

    def take(self, gathered: Tensor) -> Tensor:
        """Select this rank's rows [K, ...] from gathered keys or values [T, ...]."""
        return _Taken.apply(gathered, self.rows, self.seen, self.back, self.front)


@dataclass(frozen=True)
class VarlenSequences:
    """The sequences of a micro-batch, or this rank's pieces of them, as `varlen_attn` takes them."""

    cu_seqlens_q: Tensor  # [P+1] int32 first query of each, and the number of queries
    cu_seqlens_k: Tensor  # [P+1] int32 first key of each, and the number of keys
    max_q: int
    max_k: int
    keys: PieceKeys | None  # None on one rank, which uses the keys in their order

    @classmethod
    def of(cls, cu_seqlens: Tensor, rank: int = 0, size: int = 1) -> "VarlenSequences":
        """Return the sequences, or the pieces of a rank, on the host.

        Args:
            cu_seqlens: [S+1] int32 on the host, first token of each sequence, and T.
            rank: Index of this rank in its context-parallel group, which decides its queries.
            size: Number of ranks in that group; if above 1, lengths are multiples of `2 * size`.
        """
        lengths = cu_seqlens.diff()
        if size == 1:
            longest = int(lengths.max())
            return cls(cu_seqlens, cu_seqlens, longest, longest, None)
        num_queries = (lengths // (2 * size)).repeat_interleave(2)
        num_keys = _num_keys(lengths, rank, size)
        return cls(
            _starts(num_queries),
            _starts(num_keys),
            int(num_queries.max()),
            int(num_keys.max()),
            PieceKeys.of(cu_seqlens, rank, size),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute causal attention inside each of the packed sequences.

        Args:
            query: [T', heads, D], float16 or bfloat16 on a GPU.
            key: [T, key-value heads, D], in the order in which context-parallel ranks gather them.
            value: [T, key-value heads, D of values], likewise.
            scale: Factor on the scores; `None` means 1/sqrt(D).

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
        causal: Any = dict(window_size=(-1, 0), scale=scale, **_GROUPED_HEADS)
        attended = varlen_attn(query, key, value, *places, **causal)
        assert isinstance(attended, Tensor), "the log-sum-exp was not requested"
        return attended[..., :value_head_dim]


def _num_keys(lengths: Tensor, rank: int, size: int) -> Tensor:
    """Return the number of keys that each piece of a rank sees, [2S]: the keys up to the piece's end."""
    pieces = lengths.new_tensor([rank + 1, 2 * size - rank])
    return (lengths[:, None] // (2 * size) * pieces).flatten()


def _starts(lengths: Tensor) -> Tensor:
    """[P] -> [P+1] int32: first row of each, and the number of rows."""
    ends = lengths.cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


class _Taken(torch.autograd.Function):
    """Select `rows`, [T, ...] -> [K, ...]; the backward pass adds gradients by the indices of `PieceKeys`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, seen: Tensor, back: Tensor, front: Tensor) -> Tensor:
        ctx.save_for_backward(seen, back, front)
        ctx.num_gathered = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (seen, back, front), gradient = ctx.saved_tensors, gradients[0]
        summed = gradient.index_select(0, back)
        summed[: front.numel()].add_(gradient.index_select(0, front))
        whole = gradient.new_zeros(ctx.num_gathered, *gradient.shape[1:])
        return whole.index_copy_(0, seen, summed), None, None, None, None
