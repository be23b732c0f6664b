"""Packing: each value stands at the position that scores its token, and no sample is lost or cut."""

from dataclasses import replace

import torch
from samples import ROUTING, make_sample

from megatron_dppo.data.packing import WeightedSample, pack, placeholder
from megatron_dppo.types import Microbatch

FIRST = make_sample([10, 11, 12, 13, 14], prompt_length=2, reward=1.0)
SECOND = make_sample([20, 21, 22], prompt_length=1, mask=[True, False])


def packed() -> Microbatch:
    weighted = [WeightedSample(FIRST, torch.tensor([1.0, 2.0, 3.0])), WeightedSample(SECOND, torch.ones(2))]
    return pack(weighted)


def test_a_token_is_scored_at_the_position_before_it() -> None:
    m = packed()
    assert m.tokens.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert m.targets.tolist() == [11, 12, 13, 14, 0, 21, 22, 0]
    assert m.loss_mask.tolist() == [False, True, True, True, False, True, False, False]
    assert m.rollout_log_probs.tolist() == [0, -1, -2, -3, 0, -1, -2, 0]
    assert m.token_weights.tolist() == [0, 1, 2, 3, 0, 1, 1, 0]
    assert m.advantages.tolist() == [0, 0.5, 0.5, 0.5, 0, -0.5, -0.5, 0]
    assert m.topk is not None
    assert m.topk.ids[:, 1].tolist() == [-1, 50, 51, 52, -1, 50, 51, -1]
    assert m.topk.log_probs[0].tolist() == [float("-inf")] * 2
    assert m.weight_versions is not None and m.weight_versions.dtype == torch.int32
    assert m.weight_versions.tolist() == [-1, 6, 7, 7, -1, 6, 7, -1]
    assert m.num_loss_tokens == 4


def test_samples_of_unknown_weights_carry_no_versions() -> None:
    unknown = WeightedSample(replace(SECOND, weight_versions=()), torch.ones(2))
    assert pack([unknown]).weight_versions is None
    mixed = pack([unknown, WeightedSample(SECOND, torch.ones(2))]).weight_versions
    assert mixed is not None and mixed.tolist() == [-1, -1, -1, 6, 7, -1]


def test_sequences_start_over_in_positions_and_cu_seqlens() -> None:
    m = packed()
    assert m.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert m.cu_seqlens.tolist() == [0, 5, 8]
    assert m.cu_seqlens.dtype == torch.int32
    assert m.max_seqlen == 5


def test_the_last_token_replays_the_row_before_it() -> None:
    routes = packed().routed_experts
    assert routes is not None
    assert routes.indices[:, 0, 0].tolist() == [0, 1, 2, 3, 3, 0, 1, 1]
    assert routes.layer_numbers == ROUTING.layer_numbers


def test_a_placeholder_trains_nothing_and_has_distinct_experts() -> None:
    m = placeholder(3, ROUTING)
    assert m.num_loss_tokens == 0
    assert m.topk is not None and m.topk.ids.shape == (2, 3)
    assert m.routed_experts is not None and m.routed_experts.indices[0, 0].tolist() == [0, 1]
    assert placeholder(0, None).routed_experts is None
