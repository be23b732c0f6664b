"""Packing: each value stands at the position that scores its token, and no sample is lost or cut."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_dppo.data.batches.packing import (
    filled_up,
    is_chosen,
    measured_part,
    pack,
    placeholder,
    token_slice,
    with_places,
)
from megatron_dppo.types import Microbatch, RolloutTopK
from tests.support.counted_bytes import tensor_work
from tests.support.samples import ROUTING, assert_same, make_sample

FIRST = make_sample([10, 11, 12, 13, 14], prompt_length=2, reward=1.0)
SECOND = make_sample([20, 21, 22], prompt_length=1, mask=[True, False])


def packed() -> Microbatch:
    weighted = [
        replace(FIRST, token_weights=torch.tensor([1.0, 2.0, 3.0])),
        replace(SECOND, token_weights=torch.ones(2)),
    ]
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
    unknown = replace(SECOND, weight_versions=(), token_weights=torch.ones(2))
    assert pack([unknown]).weight_versions is None
    mixed = pack([unknown, replace(SECOND, token_weights=torch.ones(2))]).weight_versions
    assert mixed is not None and mixed.tolist() == [-1, -1, -1, 6, 7, -1]


def test_custom_rules_get_the_place_of_each_learning_token() -> None:
    m = with_places(packed())
    assert m.positions is not None and m.lengths is not None
    assert m.positions.tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    assert m.lengths.tolist() == [0, 3, 3, 3, 0, 1, 0, 0]


def test_the_measured_part_is_what_packing_its_samples_alone_gives() -> None:
    samples = [make_sample(list(range(5 + n)), 2, group=str(n)) for n in range(12)]
    weighted = [replace(s, token_weights=torch.ones(s.response_length)) for s in samples]
    chosen = [w for w in weighted if is_chosen(w.id, 0.4)]
    assert 0 < len(chosen) < len(samples)
    filler = placeholder(2, ROUTING)
    assert_same(measured_part(pack(weighted, 0.4), filler), pack(chosen, 0.4))
    others = [w for w in weighted if w not in chosen]
    assert measured_part(pack(others, 0.4), filler) is filler
    whole = pack(weighted)
    assert whole.is_measured is None and measured_part(whole, filler) is whole


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_share_of_the_samples_is_chosen_by_their_ids(share: float) -> None:
    ids = [f"rollout{n}/prompt/0+{n % 8}" for n in range(20_000)]
    chosen = {each for each in ids if is_chosen(each, share)}
    assert len(chosen) / len(ids) == pytest.approx(share, abs=0.01)
    assert {each for each in ids if is_chosen(each, 1.0)} == set(ids)
    assert chosen <= {each for each in ids if is_chosen(each, share + 0.05)}, (
        "a larger share holds a smaller one"
    )


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


def test_routes_are_copied_once() -> None:
    """Most bytes of a sample are its routes."""
    with_routes = [replace(s, token_weights=torch.ones(s.response_length)) for s in (FIRST, SECOND)]
    without = [replace(s, routed_experts=None) for s in with_routes]
    num_bytes = [
        tensor_work(lambda samples=samples: pack(samples)).num_bytes for samples in (with_routes, without)
    ]
    routes = packed().routed_experts
    assert routes is not None and num_bytes[0] - num_bytes[1] == routes.indices.nbytes


def test_tokens_of_a_rank_are_copied_once() -> None:
    cases = packed(), replace(packed(), topk=None)
    pieces = [token_slice(m, 0, context=2, tensor=1) for m in cases]
    work = [tensor_work(partial(piece.local, m)) for piece, m in zip(pieces, cases, strict=True)]
    topk = pieces[0].local(cases[0]).topk
    assert topk is not None and topk.ids[3].tolist() == [-1, -1], "padding"
    assert work[0].num_bytes - work[1].num_bytes == topk.ids.nbytes + topk.log_probs.nbytes


def test_a_rank_that_has_all_tokens_gets_the_micro_batch_itself() -> None:
    m = packed()
    assert token_slice(m, 0, context=1, tensor=1).local(m) is m
    assert token_slice(m, 0, context=1, tensor=4).local(m) is m
    padded = token_slice(m, 0, context=1, tensor=3).local(m)
    assert padded.tokens.numel() == 9 and padded.cu_seqlens.tolist() == [0, 5, 9]
    first = slice(m.tokens.numel())
    routes = replace(padded.routed_experts, indices=padded.routed_experts.indices[first])  # type: ignore[union-attr, type-var]
    assert_same(replace(padded.rows(first), cu_seqlens=m.cu_seqlens, routed_experts=routes), m)
    two = placeholder(2, ROUTING)  # with padding, each rank of two has as many tokens as there are
    halves = [token_slice(two, rank, context=2, tensor=1).local(two) for rank in range(2)]
    assert [half.tokens.numel() for half in halves] == [2, 2]
    assert [half.position_ids.tolist() for half in halves] == [[0, 3], [1, 2]]


@pytest.mark.parametrize("columns", [0, 3])
def test_placeholders_have_the_columns_of_the_others(columns: int) -> None:
    m = packed()
    ids = torch.zeros((m.tokens.numel(), columns), dtype=torch.int32)
    m = replace(m, topk=RolloutTopK(ids, torch.zeros(ids.shape)) if columns else None)
    one, filler, other = filled_up([m], 3, None)
    assert one is m and filler is other and filler.num_loss_tokens == 0
    assert (filler.topk.ids.shape[1] if filler.topk is not None else 0) == columns
    assert filler.old_log_probs is not None and filler.old_log_probs.tolist() == [0.0, 0.0]


def test_a_placeholder_trains_nothing_and_has_an_expert_of_each_of_top_k_ranks() -> None:
    m = placeholder(3, ROUTING)
    assert m.num_loss_tokens == 0
    assert m.topk is not None and m.topk.ids.shape == (2, 3)
    assert m.routed_experts is not None and m.routed_experts.indices[0, 0].tolist() == [0, 4]
    assert placeholder(0, None).routed_experts is None
