"""The tokens that the losses of routers count, on each sequence-parallel rank, shared prefixes or not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.actor.router_losses import _RouterTap, _Tokens
from megatron_dppo.architectures.megatron_options import RouterCoefficients
from megatron_dppo.data.batches.prefixes import RepeatedRows

NUM_EXPERTS = 3


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("per_rank", [4, 5])
@pytest.mark.parametrize("is_shared", [True, False])
def test_counts_and_weights_are_sums_over_rows(num_ranks: int, per_rank: int, is_shared: bool) -> None:
    """Four sequences of unlike lengths; a rank has some tokens, and rows of tokens of other ranks too."""
    generator = torch.Generator().manual_seed(10 * num_ranks + per_rank)
    num_tokens, num_sequences = num_ranks * per_rank, 4
    num_rows = 2 * num_tokens + 3 if is_shared else num_tokens
    sources = (
        torch.randint(num_tokens, (num_rows,), generator=generator) if is_shared else torch.arange(num_rows)
    )
    is_learning = torch.rand(num_rows, generator=generator) < 0.6
    sequence = torch.randint(num_sequences, (num_rows,), generator=generator).sort().values
    chosen = torch.randn(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    of_sequence = torch.randn(num_sequences, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    counts = torch.zeros(num_sequences, NUM_EXPERTS, dtype=torch.float64)
    weights = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.float64)
    for row, token in enumerate(sources.tolist()):
        if is_learning[row]:
            counts[sequence[row]] += chosen[token]
            weights[token] += of_sequence[sequence[row]]
    parts = list[_Tokens]()
    for rank in range(num_ranks):
        own = slice(rank * per_rank, (rank + 1) * per_rank)
        rows = RepeatedRows.of(sources, num_tokens) if is_shared else None
        seen = slice(None) if is_shared else own
        num_learning = torch.zeros(num_tokens).index_add_(0, sources, is_learning.float()).long()[own]
        parts.append(_Tokens(num_learning, is_learning[seen], sequence[seen], num_sequences, rows, own))
    found = [part.counts(chosen[part.own]) for part in parts]
    assert torch.allclose(torch.stack(found).sum(0), counts, rtol=0, atol=1e-12)
    assert torch.allclose(torch.cat([part.weights(of_sequence) for part in parts]), weights, rtol=0, atol=1e-12)


def test_a_token_counts_for_its_experts_in_each_sequence_that_it_learns_in() -> None:
    """Experts' biases move by these counts. A shared token learns in several sequences, forwarded once."""
    generator = torch.Generator().manual_seed(5)
    config = SimpleNamespace(moe_router_bias_update_rate=0.01)
    router: Any = SimpleNamespace(
        weight=torch.zeros(1), num_experts=NUM_EXPERTS, enable_expert_bias=True, config=config
    )
    routing_map = torch.zeros(6, NUM_EXPERTS, dtype=torch.bool)
    router.routing = lambda logits: (logits, routing_map)
    tap, expected = _RouterTap(router, RouterCoefficients(), 1.0), torch.zeros(NUM_EXPERTS)
    for num_learning in ([0, 1, 2, 3, 0, 5], [2, 2, 0, 1, 4, 0]):
        routing_map.copy_(torch.rand(6, NUM_EXPERTS, generator=generator) < 0.5)
        counts = torch.tensor(num_learning)
        tap.tokens = _Tokens(counts, counts > 0, torch.zeros(6).long(), 1, None, slice(0, 6))
        tap.routing(torch.zeros(6, 1, NUM_EXPERTS, requires_grad=True))
        for experts, times in zip(routing_map, num_learning, strict=True):
            expected[experts] += times
    assert torch.equal(tap.num_tokens, expected) and len(set(expected.tolist())) > 1
