"""Samples as parcels: every field bit for bit, to every rank of the group that trains on them, and no other."""

import math
from dataclasses import MISSING, fields, replace

import pytest
import torch

from megatron_dppo.data.batches.exchange import OF_RESPONSES, DataParallel, decode, encode
from megatron_dppo.data.batches.gradient_steps import exchange_samples
from megatron_dppo.errors import DataError
from megatron_dppo.types import RoutedExperts, Sample, WeightVersionSpan
from tests.support.ranks_on_threads import on_ranks
from tests.support.samples import assert_same, make_sample


def whole() -> Sample:
    """A sample with something unusual in every field."""
    sample = make_sample(list(range(9)), 2, mask=[True, False] * 3 + [True], reward=0.1, group="grüße")
    assert sample.routed_experts is not None
    wide = sample.routed_experts.indices.to(torch.int16) + 300
    return replace(
        sample,
        finish_reason="length",
        rollout_log_probs=torch.tensor([-0.1, float("-inf"), float("nan"), -0.0, 1e-45, -3.0, -4.0]),
        routed_experts=RoutedExperts(wide, (0, 2), 512),
        weight_versions=(WeightVersionSpan(0, 3, 7), WeightVersionSpan(3, 7, 8)),
        num_retractions=2,
        num_moves=4,
        num_cached_tokens=5,
        routes_fault="ü",
        reward=1 / 3,
        reward_info={"format": 0.1, "length": math.nan},
        advantage=-1e-17,
        token_weights=torch.linspace(0.0, 0.6, 7),
        branch=3,
    )


def plain() -> Sample:
    """A sample without anything that may be left out."""
    sample = make_sample([5, 6, 7], 2)
    return replace(sample, topk=None, routed_experts=None, reward=None, advantage=None)


def test_every_field_comes_back_bit_for_bit() -> None:
    samples = [whole(), plain(), make_sample([1, 2, 3, 4], 1), whole()]
    for field in fields(Sample):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        is_default = getattr(samples[0], field.name) == default
        assert is_default == (field.name in OF_RESPONSES), f"{field.name} is part of what is compared"
    assert_same(decode(encode(samples)), samples)


def test_nothing_and_tensors_without_elements_are_parcels_too() -> None:
    assert decode(torch.empty(0, dtype=torch.uint8)) == []
    assert decode(encode([])) == []
    sample = make_sample([1], 1)
    assert sample.topk is not None and sample.topk.ids.shape == (0, 2)
    assert_same(decode(encode([sample])), [sample])


def test_views_and_transposed_tensors_are_sent_as_what_they_show() -> None:
    sample = make_sample(list(range(20)), 3)
    view = replace(sample, tokens=torch.arange(40)[::2], prompt_length=3)
    assert_same(decode(encode([view])), [view])
    assert encode([view]).numel() < encode([sample]).numel() + 64
    one = make_sample([5, 6, 7], 2)
    strided = replace(one, rollout_log_probs=torch.zeros(1, 2)[:, 0])  # contiguous by torch's word, of stride 2
    assert strided.rollout_log_probs.stride() == (2,)
    assert_same(decode(encode([strided])), [strided])


@pytest.mark.parametrize("keep", [4, 12, 300, -8])
def test_a_torn_parcel_is_refused(keep: int) -> None:
    with pytest.raises(DataError, match="expected samples, as another rank sent them"):
        decode(encode([whole(), whole()])[:keep])


@pytest.mark.parametrize("group_of_rank", [(0, 1), (0, 0), (0, 1, 0, 1), (0, 0, 1, 1)], ids=str)
def test_samples_reach_every_rank_of_their_group_and_no_other(group_of_rank: tuple[int, ...]) -> None:
    size = len(group_of_rank)
    everything = [make_sample([rank, place, 9], 1) for rank in range(size) for place in range(3)]
    owners = [rank for rank in range(size) for _ in range(3)]
    targets = [place % (max(group_of_rank) + 1) for place in range(len(everything))]

    def work(data_parallel: DataParallel) -> dict[int, Sample]:
        rank = data_parallel.peers.rank
        own = everything[3 * rank : 3 * rank + 3]
        samples = exchange_samples(own, owners, targets, data_parallel)
        assert own == []
        for place, sample in samples.items():
            assert (sample is everything[place]) == (owners[place] == rank), "only what moves is copied"
        return samples

    for rank, samples in enumerate(on_ranks(work, group_of_rank)):
        expected = {p: s for p, s in enumerate(everything) if targets[p] == group_of_rank[rank]}
        assert list(samples) == list(expected)
        assert_same(list(samples.values()), list(expected.values()))
