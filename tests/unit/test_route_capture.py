"""What captured routes are refused for, and how agreement is counted."""

from dataclasses import replace

import pytest
import torch
from samples import ROUTING, make_sample

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.routing_replay.agreement import overlap
from megatron_dppo.routing_replay.capture import validate_routes
from megatron_dppo.types import RoutedExperts, Sample

GOOD = make_sample([1, 2, 3, 4], prompt_length=1)
assert GOOD.routed_experts is not None
INDICES = GOOD.routed_experts.indices


def routed(
    indices: torch.Tensor,
    layers: tuple[int, ...] = ROUTING.layer_numbers,
    num_experts: int = ROUTING.num_experts,
) -> Sample:
    return replace(GOOD, routed_experts=RoutedExperts(indices, layers, num_experts))


def test_good_routes_pass() -> None:
    validate_routes(GOOD, ROUTING)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (replace(GOOD, routed_experts=None), "no routed_experts"),
        (routed(INDICES[:-1]), r"\(2, 2, 2\); expected \(3, 2, 2\)"),
        (routed(INDICES[:, :1]), "expected"),
        (routed(INDICES, layers=(0, 1)), r"layers \(0, 1\)"),
        (routed(INDICES, num_experts=16), "routes over 16 experts; the model has 8"),
        (routed(INDICES + 7), "expected 0..7"),
        (routed(torch.zeros_like(INDICES)), "nothing was captured"),
        (routed(INDICES.clone().index_fill_(2, torch.tensor([1]), 0)), "twice"),
    ],
)
def test_bad_routes_are_refused(sample: Sample, words: str) -> None:
    with pytest.raises(RoutingReplayError, match=words) as error:
        validate_routes(sample, ROUTING)
    assert GOOD.id in str(error.value)


def test_overlap_is_the_shared_fraction_whatever_the_order() -> None:
    own = torch.tensor([[0, 1], [2, 3], [4, 5]])
    rollout = torch.tensor([[1, 0], [3, 6], [6, 7]])
    assert overlap(own, rollout, 8).tolist() == [1.0, 0.5, 0.0]
