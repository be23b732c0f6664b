"""What captured routes are refused for, and how agreement is counted."""

import tracemalloc
from dataclasses import replace

import pytest
import torch

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.routing_replay.replay import dtype_of_sums
from megatron_dppo.routing_replay.routes import overlap, validate_routes
from megatron_dppo.types import ModelRouting, RoutedExperts, Sample
from tests.support.counted_bytes import tensor_work
from tests.support.samples import ROUTING, make_sample

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


@pytest.mark.parametrize(("dtype", "num_experts"), [(torch.uint8, 128), (torch.int16, 512)])
def test_routes_are_checked_as_narrow_as_they_came(dtype: torch.dtype, num_experts: int) -> None:
    """There are 384 of them for each token of Qwen3-30B-A3B: as int64, they would take 3 kB of it."""
    routing = ModelRouting(tuple(range(48)), num_experts, 8)
    places = torch.arange(4000)[:, None, None] + torch.arange(48)[:, None] + 16 * torch.arange(8)
    read = int(str(num_experts))  # from another file than the model's: an equal number, not the same object
    routes = RoutedExperts((places % num_experts).to(dtype), tuple(range(48)), read)
    sample = replace(GOOD, tokens=torch.zeros(4001, dtype=torch.int64), routed_experts=routes)
    work = tensor_work(lambda: validate_routes(sample, routing))
    tracemalloc.start()
    try:
        validate_routes(sample, routing)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert work.num_bytes + peak < 1.5 * routes.indices.nbytes, "torch's and NumPy's"
    repeated = routes.indices.clone()
    repeated[7, 3, 5] = repeated[7, 3, 2]
    repeated[9, 0, :3] = repeated[9, 0, 0]
    with pytest.raises(RoutingReplayError, match="2 rows"):
        validate_routes(replace(sample, routed_experts=replace(routes, indices=repeated)), routing)


@pytest.mark.parametrize("num_experts", [1, 2, 128, 255, 256, 257, 512])
def test_recorded_expert_ids_are_summed_in_the_narrowest_type_that_holds_them(num_experts: int) -> None:
    """DeepSeek-V3 has 256 experts, so that its ids are from 0 to 255."""
    dtype = dtype_of_sums(ModelRouting((0,), num_experts, 1))
    ids = torch.arange(num_experts)
    assert torch.equal(ids.to(dtype).long(), ids)
    assert dtype == (torch.uint8 if num_experts - 1 <= torch.iinfo(torch.uint8).max else torch.int32)
