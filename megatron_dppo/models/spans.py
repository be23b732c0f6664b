"""Describes what attends to what in a packed micro-batch: spans of queries, and the keys that each one sees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.data.batches.packing import zigzag
from megatron_dppo.data.batches.prefixes import RepeatedRows


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
