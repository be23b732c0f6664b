"""Makes the micro-batches of a traced step: full, with sequences of the longest allowed length."""

from typing import Any

import torch
from torch import Tensor

from megatron_dppo.types import Microbatch, ModelRouting, RolloutTopK, RoutedExperts


def lengths_of(num_tokens: int, longest: int) -> list[int]:
    """Return the lengths of the packed sequences: longest allowed sequences, and one with the rest."""
    whole, rest = divmod(num_tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)


def full_microbatch(
    lengths: list[int], vocab_size: int, routing: ModelRouting | None, num_topk: int, *, has_old: bool
) -> Microbatch:
    """Return a micro-batch on the host, with every token trained.

    Args:
        lengths: Lengths of the packed sequences.
        vocab_size: Vocabulary size of the model.
        routing: Dimensions of the tokens' routes, which use each expert in turn. None means no routes.
        num_topk: Number of columns of the rollout's Top-K.
        has_old: Whether old log-probs, for a recomputed anchor, and the reference's log-probs are included.
    """
    num = sum(lengths)
    ids = torch.arange(num).remainder(vocab_size)
    floats = torch.full((num,), -1.0)
    topk = None
    if num_topk:
        columns = torch.arange(num_topk, dtype=torch.int32).expand(num, -1).contiguous()
        topk = RolloutTopK(columns, torch.full((num, num_topk), -4.0))
    return Microbatch(
        tokens=ids,
        targets=ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        loss_mask=torch.ones(num, dtype=torch.bool),
        rollout_log_probs=floats,
        advantages=floats,
        token_weights=torch.ones(num),
        old_log_probs=floats if has_old else None,
        ref_log_probs=floats if has_old else None,
        topk=topk,
        routed_experts=None
        if routing is None
        else RoutedExperts(_routes(num, routing), *routing_rest(routing)),
    )


def _routes(num: int, routing: ModelRouting) -> Tensor:
    dtype = torch.uint8 if routing.num_experts <= 256 else torch.int16
    routes = torch.arange(num * routing.top_k).remainder(routing.num_experts).view(num, 1, -1).to(dtype)
    return routes.expand(-1, len(routing.layer_numbers), -1)


def routing_rest(routing: ModelRouting) -> tuple[Any, ...]:
    """Return the fields of `RoutedExperts` after the indices."""
    return routing.layer_numbers, routing.num_experts
