"""Finds the tokens that sequences have in common: a prefix of several sequences is forwarded once.

Sequences form a tree: two of them share their tokens up to the first one that differs, or whose recorded routes
differ, because replay then forwards it through other experts. Each token belongs to the first sequence that has
it. So the tokens of a sequence that no earlier one has are its last ones: they attend to the complete sequence,
and its other tokens were forwarded as an earlier sequence's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int64, Shaped
from torch import Tensor

from megatron_dppo.types import Microbatch, Sample


@dataclass(frozen=True, eq=False)
class RepeatedRows:
    """An index of rows in which a row may come several times; gradients are summed in a fixed order."""

    rows: Int64[Tensor, " N"]
    places: Int64[Tensor, " N"]  # places in `rows` of each of the M rows, in ascending order, row by row
    starts: Int64[Tensor, " M"]  # first index of each row's places

    @classmethod
    def of(cls, rows: Int64[Tensor, " N"], num_rows: int) -> "RepeatedRows":
        """Return the index `rows` of tensors with `num_rows` rows."""
        counts = torch.bincount(rows, minlength=num_rows)
        return cls(rows, rows.argsort(stable=True), counts.cumsum(0) - counts)

    def take(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "N ..."]:
        """Select the rows."""
        function: Any = _Taken
        return function.apply(values, self.rows, self.places, self.starts)

    def summed(self, values: Shaped[Tensor, "N ..."]) -> Shaped[Tensor, "M ..."]:
        """Sum the values of each row, in float32 or wider, in the order of `rows`."""
        return _summed(values, self.places, self.starts)


@dataclass(frozen=True)
class Branch:
    """A sequence in a tree: it follows an earlier one for some tokens, and has the rest alone."""

    sequence: int
    parent: int  # the sequence that it follows; -1 if it follows none
    num_shared: int  # tokens that it follows it for


@dataclass(frozen=True)
class Path:
    """The tokens of a sequence, and their routes if they are recorded."""

    tokens: np.ndarray[Any, Any]  # [L] int64
    routes: np.ndarray[Any, Any] | None = None  # [L, moe_layers, top_k]

    @classmethod
    def of(cls, sample: Sample) -> "Path":
        """Return a sample's path. Its last token repeats the routes before, as in a packed micro-batch."""
        routes = sample.routed_experts
        if routes is None:
            return cls(sample.tokens.numpy())
        return cls(sample.tokens.numpy(), torch.cat([routes.indices, routes.indices[-1:]]).numpy())

    def num_in_common(self, other: "Path", start: int) -> int:
        """Return the length of the longest common prefix, of which `start` tokens are known to be equal."""
        end = _first_difference(self.tokens, other.tokens, start)
        if self.routes is not None and other.routes is not None:
            end = _first_difference(self.routes[:end], other.routes[:end], start)
        return end


def _first_difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], start: int) -> int:
    end = min(len(one), len(other))
    differs = one[start:end] != other[start:end]
    if differs.ndim > 1:
        differs = differs.any(axis=tuple(range(1, differs.ndim)))
    return start + int(differs.argmax()) if differs.any() else end


def branches(paths: Sequence[Path]) -> Iterator[Branch]:
    """Yield the sequences as leaves of the trees, depth first, each after the sequence that it follows.

    A sequence shares `num_shared` tokens with the sequence just before it, and with no earlier one more.
    """
    waiting = [(-1, 0, members) for members in _by_next_token(paths, range(len(paths)), 0)]
    while waiting:
        parent, depth, (first, *others) = waiting.pop()
        yield Branch(first, parent, depth)
        leaving: dict[int, list[int]] = {}  # by the depth at which they leave the first
        for each in others:
            leaving.setdefault(paths[first].num_in_common(paths[each], depth), []).append(each)
        for length, members in sorted(leaving.items()):  # the last of these, the deepest, comes next
            waiting += [(first, length, some) for some in _by_next_token(paths, members, length)]


def _by_next_token(paths: Sequence[Path], members: Sequence[int], depth: int) -> list[list[int]]:
    """Divide sequences by the token at a depth, the group of the first one last."""
    groups: dict[int, list[int]] = {}
    for each in members:
        tokens = paths[each].tokens
        groups.setdefault(int(tokens[depth]) if depth < len(tokens) else -1, []).append(each)
    return list(groups.values())[::-1]


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """The distinct tokens of a micro-batch, and each token's place among them."""

    tokens: Int64[Tensor, " D"]  # place in the micro-batch of each distinct token
    sources: Int64[Tensor, " T"]  # distinct token of each token of the micro-batch
    num_own: Int64[Tensor, " S"]  # distinct tokens of each sequence, its last ones

    @classmethod
    def of(cls, microbatch: Microbatch) -> "SharedPrefixes | None":
        """Return the distinct tokens of a micro-batch on the host, or None if all of them are distinct."""
        tokens, routes = microbatch.tokens.numpy(), microbatch.routed_experts
        indices = None if routes is None else routes.indices.numpy()
        starts = [int(start) for start in microbatch.cu_seqlens]
        spans = [slice(start, stop) for start, stop in pairwise(starts)]
        found = list(branches([Path(tokens[s], None if indices is None else indices[s]) for s in spans]))
        num_shared = torch.zeros(len(spans), dtype=torch.int64)
        for branch in found:
            num_shared[branch.sequence] = branch.num_shared
        if not num_shared.any():
            return None
        lengths = microbatch.cu_seqlens.diff().long()
        is_own = microbatch.position_ids >= num_shared.repeat_interleave(lengths)
        sources = is_own.cumsum(0) - 1
        for branch in found:  # a parent comes before the sequences that follow it
            own, length = spans[branch.sequence].start, branch.num_shared
            if length:
                followed = spans[branch.parent].start
                sources[own : own + length] = sources[followed : followed + length]
        return cls(is_own.nonzero()[:, 0], sources, lengths - num_shared)

    def distinct(self, microbatch: Microbatch) -> Microbatch:
        """Return the distinct tokens as a micro-batch of the parts of sequences that they are."""
        routes, lengths = microbatch.routed_experts, self.num_own[self.num_own > 0]
        if routes is not None:
            routes = replace(routes, indices=routes.indices[self.tokens])
        return replace(
            microbatch.rows(self.tokens),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
            routed_experts=routes,
            sample_ids=(),
        )

    def num_keys(self, microbatch: Microbatch) -> Int64[Tensor, " parts"]:
        """Return the number of tokens that the last token of each part of a sequence sees."""
        return microbatch.cu_seqlens.diff().long()[self.num_own > 0]

    def keys(self, microbatch: Microbatch) -> Int64[Tensor, " keys"]:
        """Return the distinct tokens that each part of a sequence sees, part by part."""
        lengths = microbatch.cu_seqlens.diff().long()
        return self.sources[(self.num_own > 0).repeat_interleave(lengths)]


def tokens_in_loss(microbatch: Microbatch) -> tuple[Int64[Tensor, " N"], Microbatch]:
    """Return the places of a micro-batch's tokens in the loss, and these tokens without routes.

    They are parts of their sequences, of which some may be empty. If a micro-batch has none, its first token
    is returned: a loss needs a row.
    """
    places = microbatch.loss_mask.nonzero()[:, 0]
    places = places if places.numel() else places.new_zeros(1)
    ends = torch.searchsorted(places, microbatch.cu_seqlens.long()).to(torch.int32)
    return places, replace(microbatch.rows(places), cu_seqlens=ends, routed_experts=None)


def num_distinct_tokens(microbatch: Microbatch) -> int:
    """Return the number of tokens of a micro-batch, each shared prefix counted once."""
    prefixes = SharedPrefixes.of(microbatch)
    return microbatch.tokens.numel() if prefixes is None else prefixes.tokens.numel()


class _Taken(torch.autograd.Function):
    """Selected rows; the backward pass sums the gradients of each row, with no atomic addition."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, places: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(places, starts)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(gradients[0], *ctx.saved_tensors), None, None, None


def _summed(values: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    flat = values.reshape(values.shape[0], values[0].numel())
    sums = F.embedding_bag(places, flat, starts, mode="sum")  # one kernel, a thread for each element
    return sums.view(-1, *values.shape[1:])
