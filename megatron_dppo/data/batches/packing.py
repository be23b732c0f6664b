"""Packs sequences of samples end to end into micro-batches, and selects the tokens that a rank forwards.

Context and sequence parallelism split the tokens of a micro-batch. Sequences are padded if the layout requires
it. Each context-parallel rank then takes two pieces of every sequence, one from its front and one from its back
("zig-zag"). Causal attention then costs all ranks the same.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import torch
from jaxtyping import Int32, Int64, Shaped
from torch import Tensor

from megatron_dppo.algorithms.inputs import place_of_tokens
from megatron_dppo.algorithms.loss_terms import OPTIONAL_INPUTS
from megatron_dppo.types import Microbatch, ModelRouting, RolloutTopK, RoutedExperts, Sample, each_token


def pack(samples: Sequence[Sample], measured_share: float = 1.0) -> Microbatch:
    """Pack one or more samples into one micro-batch, in the given order, with all per-token values.

    If `measured_share` < 1, this share of all samples is chosen by id, and its tokens are marked `is_measured`.
    """
    lengths = torch.tensor([s.tokens.numel() for s in samples])
    weights = [_token_weights(s) for s in samples]
    return Microbatch(
        tokens=torch.cat([s.tokens for s in samples]),
        position_ids=torch.cat([torch.arange(s.tokens.numel()) for s in samples]),
        targets=torch.cat([s.tokens.roll(-1).index_fill(0, torch.tensor([-1]), 0) for s in samples]),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
        loss_mask=_scored([s.loss_mask for s in samples], samples),
        rollout_log_probs=_scored([s.rollout_log_probs for s in samples], samples),
        advantages=_scored(
            [torch.full_like(w, _advantage(s)) for s, w in zip(samples, weights, strict=True)], samples
        ),
        token_weights=_scored(weights, samples),
        topk=_pack_topk(samples),
        routed_experts=_pack_routes(samples),
        sample_ids=tuple(s.id for s in samples),
        weight_versions=_pack_weight_versions(samples),
        is_measured=_pack_measured(samples, measured_share),
    )


def microbatches_of(sequences: Sequence[Tensor], max_tokens: int) -> list[Microbatch]:
    """Build micro-batches that score every token after the first, and train on no token.

    Args:
        sequences: [L] int64 each, L > 1.
        max_tokens: Maximum tokens of a micro-batch. A longer sequence gets its own micro-batch.
    """
    packs: list[list[Sample]] = []
    size = 0
    for tokens in sequences:
        zeros = torch.zeros(len(tokens) - 1)
        is_scored = torch.ones(len(tokens) - 1, dtype=torch.bool)
        of_sequence = Sample("", "", tokens, 1, is_scored, zeros, finish_reason="length")
        if not packs or size + len(tokens) > max_tokens:
            packs.append([])
            size = 0
        packs[-1].append(replace(of_sequence, advantage=0.0, token_weights=zeros))
        size += len(tokens)
    return [pack(samples) for samples in packs]


def _advantage(sample: Sample) -> float:
    assert sample.advantage is not None, "advantages are computed before packing"
    return sample.advantage


def _token_weights(sample: Sample) -> Tensor:
    assert sample.token_weights is not None, "weights are set before packing"
    return sample.token_weights


def _scored(per_response: Sequence[Tensor], samples: Sequence[Sample], fill: float = 0) -> Tensor:
    """Shift [R, …] per sample -> [T, …]: the value of a response token is stored one position before it."""
    rows: list[Tensor] = []
    for values, sample in zip(per_response, samples, strict=True):
        before = sample.prompt_length - 1
        rows += [
            values.new_full((before, *values.shape[1:]), fill),
            values,
            values.new_full((1, *values.shape[1:]), fill),
        ]
    return torch.cat(rows)


def _pack_topk(samples: Sequence[Sample]) -> RolloutTopK | None:
    topk = [s.topk for s in samples if s.topk is not None]
    if not topk:
        return None
    assert len(topk) == len(samples), "either every sample carries top-K log-probs or none does"
    ids = _scored([t.ids for t in topk], samples, fill=-1)
    return RolloutTopK(ids, _scored([t.log_probs for t in topk], samples, fill=float("-inf")))


def _pack_weight_versions(samples: Sequence[Sample]) -> Tensor | None:
    """Pack the weight version of each token, [T] int32, or return `None` if no sample has versions."""
    if not any(s.weight_versions for s in samples):
        return None
    rows: list[Tensor] = []
    for sample in samples:
        versions = torch.full((sample.response_length,), -1, dtype=torch.int32)
        for span in sample.weight_versions:
            versions[span.start : span.stop] = span.version
        rows.append(versions)
    return _scored(rows, samples, fill=-1)


def _pack_measured(samples: Sequence[Sample], share: float) -> Tensor | None:
    if share == 1.0:
        return None
    chosen = [torch.full((s.tokens.numel(),), is_chosen(s.id, share)) for s in samples]
    return torch.cat(chosen)


def is_chosen(sample_id: str, share: float) -> bool:
    """Whether a sample is in a random share of all samples. Depends only on its id, not on rank or layout."""
    digest = hashlib.blake2b(sample_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def measured_part(microbatch: Microbatch, filler: Microbatch) -> Microbatch:
    """Return the measured sequences of a micro-batch, or `filler` if it has none."""
    m = microbatch
    if m.is_measured is None:
        return m
    starts, lengths = m.cu_seqlens[:-1].long(), m.cu_seqlens.diff().long()
    is_kept = m.is_measured[starts]
    lengths = lengths[is_kept]
    if not lengths.numel():
        return filler
    rows, routes = m.is_measured.nonzero()[:, 0], m.routed_experts
    return replace(
        m.rows(rows),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
        routed_experts=None if routes is None else replace(routes, indices=routes.indices[rows]),
        sample_ids=tuple(compress(m.sample_ids, map(bool, is_kept))),
    )


def _pack_routes(samples: Sequence[Sample]) -> RoutedExperts | None:
    """Pack one row of routes per token. The engine never forwards a sequence's last token: it repeats a row."""
    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if not routes:
        return None
    assert len(routes) == len(samples), "either every sample carries routes or none does"
    rows = torch.cat([rows for route in routes for rows in (route.indices, route.indices[-1:])])
    return RoutedExperts(rows, routes[0].layer_numbers, routes[0].num_experts)


def placeholder(topk_columns: int, routing: ModelRouting | None) -> Microbatch:
    """Return a micro-batch of two masked tokens, for a rank that has fewer micro-batches than the others.

    Args:
        topk_columns: K of the rollout's top-K log-probs; 0 without top-K.
        routing: The model's routing if micro-batches carry routes, else `None`. Each token is routed to top_k
            evenly spaced experts. With up to top_k expert ranks, no rank is then without tokens, which modules
            of other libraries may not support.
    """
    num_tokens = 2
    zeros, never = torch.zeros(num_tokens), torch.zeros(num_tokens, dtype=torch.bool)
    topk, routes = None, None
    if topk_columns:
        none = torch.full((num_tokens, topk_columns), -1, dtype=torch.int32)
        topk = RolloutTopK(none, torch.full((num_tokens, topk_columns), float("-inf")))
    if routing is not None:
        row = torch.arange(routing.top_k, dtype=torch.int16) * (routing.num_experts // routing.top_k)
        indices = row.expand(num_tokens, len(routing.layer_numbers), routing.top_k)
        routes = RoutedExperts(indices, routing.layer_numbers, routing.num_experts)
    return Microbatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.arange(num_tokens),
        targets=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        loss_mask=never,
        rollout_log_probs=zeros,
        advantages=zeros,
        token_weights=zeros,
        topk=topk,
        routed_experts=routes,
    )


def with_places(microbatch: Microbatch) -> Microbatch:
    """Return a complete micro-batch with the `positions` and `lengths` that custom rules may read."""
    lengths = [int(length) for length in microbatch.cu_seqlens.diff()]
    places = [place_of_tokens(mask) for mask in torch.split(microbatch.loss_mask, lengths)]
    positions, counts = (torch.cat(columns) for columns in zip(*places, strict=True))
    return replace(microbatch, positions=positions, lengths=counts)


def filled_up(
    microbatches: Sequence[Microbatch], multiple: int, routing: ModelRouting | None, has_places: bool = False
) -> list[Microbatch]:
    """Append placeholders, with all optional log-probs, until the number of micro-batches is a multiple.

    All micro-batches get the columns of `with_places` if `has_places`.
    """
    topk = microbatches[0].topk
    filler = placeholder(topk.ids.shape[1] if topk is not None else 0, routing)
    zeros = torch.zeros_like(filler.advantages)
    filler = replace(filler, old_log_probs=zeros, **dict.fromkeys(OPTIONAL_INPUTS, zeros))
    complete = [*microbatches, *[filler] * (-len(microbatches) % multiple)]
    return [with_places(microbatch) for microbatch in complete] if has_places else complete


@dataclass(frozen=True, eq=False)
class TokenSlice:
    """The tokens of one context-parallel rank. Padded positions count from 0 over the padded micro-batch."""

    padded_cu_seqlens: Int32[Tensor, " S+1"]  # of the padded sequences
    padded_position: Int64[Tensor, " T"]  # position of each token of the micro-batch after padding
    own: Int64[Tensor, " own"]  # padded positions of this rank's tokens, in its order

    @cached_property
    def source(self) -> Int64[Tensor, " own"]:
        """Index of each of this rank's tokens in the micro-batch; -1 for padding."""
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
        local = each_token(microbatch, take)
        return replace(
            local,
            position_ids=torch.where(is_padding, self.own - starts[self.own], local.position_ids),
            cu_seqlens=self.padded_cu_seqlens,
            routed_experts=routes,
        )

    def scattered(self, values: Shaped[Tensor, "own ..."]) -> Shaped[Tensor, "T ..."]:
        """Scatter values of this rank's tokens to the tokens of the micro-batch, 0 elsewhere."""
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


def zigzag(
    starts: Int64[Tensor, " S"], lengths: Int64[Tensor, " S"], rank: int, size: int
) -> Int64[Tensor, " own"]:
    """Return the positions of a rank's two pieces of each sequence, sequence by sequence.

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
