"""Micro-batches of sequences that begin alike, and what attends to what in them."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.data.batches.packing import microbatches_of
from megatron_dppo.data.batches.prefixes import RepeatedRows, SharedPrefixes
from megatron_dppo.models.packed_attention import Spans
from megatron_dppo.types import Microbatch, RoutedExperts

CASES: dict[str, list[list[int]]] = {
    "nothing in common": [[1, 2], [3, 4, 5]],
    "identical siblings": [[1, 2, 3], [1, 2, 3], [1, 2, 3]],
    "a sequence that begins others": [[1, 2], [1, 2, 3, 4], [1, 2, 3, 5, 6]],
    "others begin it": [[1, 2, 3, 5, 6], [1, 2, 3, 4], [1, 2]],
    "three levels": [[1, 2, 3, 4, 5], [1, 2, 9], [1, 2, 3, 4, 7, 7], [1, 2, 3, 6], [8, 8], [8, 9, 9]],
    "a token alone": [[1, 2, 3], [1, 4]],
}


def microbatch_of(sequences: list[list[tuple[int, int]]]) -> Microbatch:
    """Tokens and the routes of each, of one layer and one expert."""
    (packed,) = microbatches_of([torch.tensor(s)[:, 0] for s in sequences], 10_000)
    routes = torch.cat([torch.tensor(s)[:, 1] for s in sequences]).div(8, rounding_mode="floor")
    return replace(packed, routed_experts=RoutedExperts(routes.to(torch.uint8).view(-1, 1, 1), (0,), 2))


def alone(tokens: list[list[int]]) -> Microbatch:
    """Sequences of tokens with one route."""
    return microbatch_of([[(token, 0) for token in sequence] for sequence in tokens])


def spans_of_prefixes(m: Microbatch) -> tuple[Spans, Tensor]:
    """What attends to what, and the forwarded token of each token."""
    prefixes = SharedPrefixes.of(m)
    if prefixes is None:
        return Spans.of_sequences(m.cu_seqlens), torch.arange(m.tokens.numel())
    keys = RepeatedRows.of(prefixes.keys(m), len(prefixes.tokens))
    own = prefixes.num_own[prefixes.num_own > 0]
    return Spans(own, prefixes.num_keys(m), keys), prefixes.sources
