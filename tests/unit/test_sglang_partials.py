"""What is sent of a response that goes on, and how its parts become one."""

import asyncio
import dataclasses
import json
from typing import Any

import pytest
import torch

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    first_route_row,
    give_up,
    join_parts,
    mask_of,
    response_alone,
    shortened,
    with_observation,
)
from megatron_dppo.engines.sglang.dispatch import count_result
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.protocol import GENERATIONS, ServedModel
from megatron_dppo.types import ModelRouting, RolloutTopK, RoutedExperts, Sample, WeightVersionSpan
from tests.support.sglang_stand_in import MODEL as STAND_IN_MODEL
from tests.support.sglang_stand_in import StandIn

MODEL = ServedModel(97, 3, (0,), ModelRouting((0, 1, 2), 8, 2))
PARAMS = SamplingParams(10, num_topk_log_probs=2, capture_routes=True)


def _part(
    first: int, count: int, num_rows: int, spans: tuple[WeightVersionSpan, ...], **changes: Any
) -> Sample:
    """Tokens `first`, `first` + 1, ..., whose log-probs, top-K and routes tell them apart."""
    tokens = torch.arange(first, first + count)
    rows = torch.arange(first, first + num_rows, dtype=torch.uint8)[:, None, None].expand(-1, 3, 2)
    topk = RolloutTopK(tokens[:, None].expand(-1, 2).int(), -tokens[:, None].expand(-1, 2).float())
    routes = RoutedExperts(rows, (0, 1, 2), 255)
    part = response_alone("g+0", tokens, -tokens.float(), "abort", topk, routes, spans)
    return dataclasses.replace(part, **changes)


OLD = _part(
    10, 3, num_rows=4, spans=(WeightVersionSpan(0, 1, 4), WeightVersionSpan(1, 3, 5))
)  # of two prompt tokens
NEW = _part(20, 2, num_rows=2, spans=(WeightVersionSpan(0, 2, 6),), finish_reason="stop", num_moves=1)
REQUEST = Request("g+0", (1, 2), (0, 0, 0), partial=OLD)


def test_old_and_new_are_one() -> None:
    whole = join_parts(OLD, NEW)
    assert whole.tokens.tolist() == [10, 11, 12, 20, 21]
    assert whole.log_probs.tolist() == [-10, -11, -12, -20, -21]
    assert whole.topk is not None and whole.routed_experts is not None
    assert whole.topk.ids[:, 0].tolist() == [10, 11, 12, 20, 21]
    assert whole.topk.log_probs[:, 1].tolist() == [-10, -11, -12, -20, -21]
    assert whole.routed_experts.indices.shape == (2 + 5 - 1, 3, 2)
    assert whole.routed_experts.indices[:, 1, 1].tolist() == [10, 11, 12, 13, 20, 21]
    assert (whole.finish_reason, whole.num_moves) == ("stop", 1)
    spans = [(span.start, span.stop, span.version) for span in whole.weight_versions]
    assert spans == [(0, 1, 4), (1, 3, 5), (3, 5, 6)]


def test_moves_retractions_and_cached_tokens_of_both_parts_are_counted() -> None:
    old = dataclasses.replace(OLD, num_moves=2, num_retractions=1, num_cached_tokens=2)
    whole = join_parts(old, dataclasses.replace(NEW, num_retractions=3, num_cached_tokens=5))
    assert (whole.num_moves, whole.num_retractions, whole.num_cached_tokens) == (3, 4, 7)


def test_spans_of_one_version_become_one() -> None:
    again = dataclasses.replace(NEW, weight_versions=(WeightVersionSpan(0, 1, 5), WeightVersionSpan(1, 2, 6)))
    spans = [(span.start, span.stop, span.version) for span in join_parts(OLD, again).weight_versions]
    assert spans == [(0, 1, 4), (1, 4, 5), (4, 5, 6)]


def test_parts_of_one_version_are_one_span() -> None:
    """A response that moved, or that a hold without a push interrupted, even several times."""
    spans = tuple(WeightVersionSpan(0, count, 5) for count in (3, 2))
    first, second = (
        dataclasses.replace(part, weight_versions=(own,)) for part, own in zip((OLD, NEW), spans, strict=True)
    )
    whole = join_parts(join_parts(first, second), dataclasses.replace(second, finish_reason="length"))
    assert whole.weight_versions == (WeightVersionSpan(0, 7, 5),)
    nothing = dataclasses.replace(give_up(dataclasses.replace(REQUEST, partial=None)), finish_reason="stop")
    assert join_parts(nothing, second).weight_versions == (WeightVersionSpan(0, 2, 5),)
    assert join_parts(first, nothing).weight_versions == (WeightVersionSpan(0, 3, 5),)


def test_an_observation_is_of_no_version() -> None:
    """Between two turns of the same weights: no version sampled its tokens."""
    first = dataclasses.replace(OLD, weight_versions=(WeightVersionSpan(0, 3, 5),))
    second = dataclasses.replace(NEW, weight_versions=(WeightVersionSpan(0, 2, 5),))
    whole = join_parts(with_observation(first, torch.tensor([7, 8])), second)
    assert whole.weight_versions == (WeightVersionSpan(0, 3, 5), WeightVersionSpan(5, 7, 5))
    assert whole.tokens.tolist() == [10, 11, 12, 7, 8, 20, 21]
    assert mask_of(whole).tolist() == [True] * 3 + [False] * 2 + [True] * 2


MASKS = [torch.tensor([True, False, True]), torch.tensor([False, True])]
ALL = [torch.ones_like(mask) for mask in MASKS]


@pytest.mark.parametrize(
    ("of_old", "of_new", "expected"),
    [
        (ALL[0], ALL[1], [True] * 5),
        (MASKS[0], ALL[1], [True, False, True, True, True]),
        (ALL[0], MASKS[1], [True, True, True, False, True]),
        (MASKS[0], MASKS[1], [True, False, True, False, True]),
    ],
)
def test_tokens_that_either_part_does_not_train_on_the_whole_does_not(
    of_old: torch.Tensor, of_new: torch.Tensor, expected: list[bool]
) -> None:
    old, new = dataclasses.replace(OLD, loss_mask=of_old), dataclasses.replace(NEW, loss_mask=of_new)
    assert join_parts(old, new).loss_mask.tolist() == expected


def test_the_beginning_of_a_response_has_what_its_tokens_have() -> None:
    whole = join_parts(
        with_observation(OLD, torch.tensor([7, 8])), dataclasses.replace(NEW, routed_experts=None)
    )
    for num_tokens, spans in (
        (6, [(0, 1, 4), (1, 3, 5), (5, 6, 6)]),
        (4, [(0, 1, 4), (1, 3, 5)]),
        (1, [(0, 1, 4)]),
    ):
        found = shortened(dataclasses.replace(whole, routed_experts=OLD.routed_experts), num_tokens)
        assert found.tokens.tolist() == [10, 11, 12, 7, 8, 20][:num_tokens]
        assert found.log_probs.tolist() == [-10, -11, -12, 0, 0, -20][:num_tokens]
        assert mask_of(found).tolist() == [True, True, True, False, False, True][:num_tokens]
        assert found.topk is not None and found.topk.ids.shape[0] == num_tokens
        assert [(span.start, span.stop, span.version) for span in found.weight_versions] == spans


def test_a_request_that_went_on_is_counted_by_what_it_added() -> None:
    """Its input alone, if it was given up before it had a token; the part before was counted then."""
    part = dataclasses.replace(
        OLD, num_retractions=2, num_cached_tokens=3, num_moves=1, routes_fault="as before"
    )
    request = dataclasses.replace(REQUEST, partial=part)
    assert count_result(request, part) == EngineCounts(num_prompt_tokens=2 + 3)
    whole = join_parts(
        part, dataclasses.replace(NEW, num_retractions=1, num_cached_tokens=4, routes_fault="lost")
    )
    expected = EngineCounts(
        num_retractions=1, num_without_routes=1, num_prompt_tokens=2 + 3, num_cached_tokens=4
    )
    assert count_result(request, whole) == expected


def test_what_a_part_lacks_the_whole_lacks() -> None:
    assert join_parts(dataclasses.replace(OLD, routed_experts=None), NEW).routed_experts is None
    assert join_parts(OLD, dataclasses.replace(NEW, topk=None)).topk is None


def test_an_engine_adds_to_what_happened_to_the_part_before() -> None:
    part = dataclasses.replace(OLD, num_moves=2, num_retractions=1, num_cached_tokens=3)
    request = dataclasses.replace(REQUEST, partial=dataclasses.replace(part, topk=None))
    params = dataclasses.replace(PARAMS, num_topk_log_probs=0)
    with StandIn(num_retractions=lambda rid: 1).running() as server:
        engine = SglangEngine(server.url, STAND_IN_MODEL)
        (whole,) = engine.generate([request], params)
    assert (whole.tokens.numel(), whole.num_moves, whole.num_retractions) == (10, 2, 2)
    assert whole.num_cached_tokens == 3 + 1
    assert engine.counts == EngineCounts(num_retractions=1, num_prompt_tokens=2 + 3, num_cached_tokens=1)


@pytest.mark.parametrize("version", GENERATIONS)
def test_the_rest_is_asked_for(version: str) -> None:
    body = GENERATIONS[version].generate_body(REQUEST, PARAMS, MODEL)
    assert body["input_ids"] == [1, 2, 10, 11, 12]
    assert body["sampling_params"]["max_new_tokens"] == 7
    assert body["routed_experts_start_len"] == 4  # the row of token 12
    without = dataclasses.replace(REQUEST, partial=dataclasses.replace(OLD, routed_experts=None))
    assert first_route_row(without) == 4, "of routes that are missing, only the last token's are sent"
    longer = dataclasses.replace(REQUEST, partial=_part(10, 6, num_rows=3, spans=()))
    assert (first_route_row(longer), first_route_row(dataclasses.replace(REQUEST, partial=None))) == (3, 0)
    fresh = GENERATIONS[version].generate_body(dataclasses.replace(REQUEST, partial=None), PARAMS, MODEL)
    assert (fresh["input_ids"], fresh["routed_experts_start_len"]) == ([1, 2], 0)


@pytest.mark.parametrize("version", GENERATIONS)
def test_an_answer_from_the_queue_leaves_what_there_was(version: str) -> None:
    body = {
        "output_ids": [],
        "meta_info": {"id": "g+0", "finish_reason": {"type": "abort"}, "completion_tokens": 0},
    }
    content = json.dumps(body).encode()
    assert asyncio.run(GENERATIONS[version].read_reply(content, REQUEST, PARAMS, MODEL)) is OLD
    fresh = dataclasses.replace(REQUEST, partial=None)
    nothing = asyncio.run(GENERATIONS[version].read_reply(content, fresh, PARAMS, MODEL))
    assert (nothing.finish_reason, nothing.tokens.numel(), nothing.topk) == ("abort", 0, None)
    assert give_up(fresh).tokens.dtype == torch.int64
