"""How often a router's own choice agrees with the rollout's, against counts of sets."""

from itertools import count

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_dppo.routing_replay.replay import Replay, _RouterTap
from megatron_dppo.types import RoutedExperts

NUM_EXPERTS, TOP_K, NUM_TOKENS = 7, 3, 40


def choose(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> tuple[Tensor, Tensor]:
    """Choose as a router of two groups does: the better group's experts alone, the best last."""
    assert (num_groups, group_topk) == (2, 1)
    is_first = scores[:, :4].amax(1) > scores[:, 4:].amax(1)
    allowed = torch.where(is_first[:, None], torch.arange(NUM_EXPERTS) < 4, torch.arange(NUM_EXPERTS) >= 4)
    found = scores.masked_fill(~allowed, -torch.inf).topk(topk)
    return found.values.flip(1), found.indices.flip(1)


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, the rollout's experts in any order, and how often each position counts."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    rollout = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return scores, rollout, torch.randint(0, 4, (NUM_TOKENS,), generator=generator)


@pytest.mark.parametrize("is_replaying", [True, False])
def test_the_agreement_of_layers_is_that_of_their_sets(is_replaying: bool) -> None:
    """Three layers of unlike numbers, over two micro-batches in which each position counts several times."""
    layers = 1, 4, 5
    taps: dict[int, _RouterTap] = {
        layer: _RouterTap(NUM_EXPERTS, TOP_K, is_replaying, is_measuring=True) for layer in layers
    }
    replay, seeds = Replay([taps]), count(1)
    expected: dict[int, float] = dict.fromkeys(layers, 0.0)
    num_counted = 0
    for _ in range(2):
        drawings = {layer: drawn(next(seeds)) for layer in layers}
        counted = drawings[4][2]
        routes = torch.stack([rollout for _, rollout, _ in drawings.values()], 1).to(torch.uint8)
        replay.follow(RoutedExperts(routes, layers, NUM_EXPERTS), counted)
        for layer, (scores, rollout, _) in drawings.items():
            values, experts = taps[layer].get_replay_topk(scores, TOP_K, 2, 1, choose)
            own = choose(scores, TOP_K, 2, 1)
            assert torch.equal(experts, rollout if is_replaying else own[1])
            assert torch.equal(values, scores.gather(1, rollout) if is_replaying else own[0])
            for mine, theirs, times in zip(own[1].tolist(), rollout.tolist(), counted.tolist(), strict=True):
                expected[layer] += times * len(set(mine) & set(theirs)) / TOP_K
        num_counted += int(counted.sum())
    found = replay.agreement()
    assert {layer: num for layer, (_, num) in found.items()} == dict.fromkeys(layers, num_counted)
    assert {layer: total for layer, (total, _) in found.items()} == pytest.approx(expected, abs=1e-9)
    assert len(set(expected.values())) == 3


def test_a_recomputed_forward_replays_its_own_routes_and_counts_nothing() -> None:
    """Two micro-batches are forwarded before the first one's backward pass, as pipelines do."""
    tap = _RouterTap(NUM_EXPERTS, TOP_K, is_replaying=True, is_measuring=True)
    replay, losses = Replay([{2: tap}]), list[tuple[Tensor, Tensor, Tensor]]()

    def forward(scores: Tensor) -> Tensor:
        return tap.get_replay_topk(scores, TOP_K, 2, 1, choose)[0].sum()

    for seed in (3, 4):
        scores, rollout, counted = drawn(seed)
        replay.follow(RoutedExperts(rollout[:, None].to(torch.uint8), (2,), NUM_EXPERTS), counted)
        scores.requires_grad_()
        losses.append((scores, checkpoint(forward, scores, use_reentrant=False), rollout))
    before = replay.agreement()
    for scores, loss, rollout in losses:
        loss.backward()
        assert scores.grad is not None
        assert torch.equal(scores.grad, torch.zeros_like(scores).scatter(1, rollout, 1.0))
    assert replay.agreement() == before
    assert not tap.forwarded, "each pass was recomputed"
