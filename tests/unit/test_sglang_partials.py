"""Requests of resumed responses, and how the parts of a response become one."""

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


def test_old_and_new_parts_become_one() -> None:
    whole = join_parts(OLD, NEW)
    assert whole.tokens.tolist() == [10, 11, 12, 20, 21]
    assert whole.log_probs.tolist() == [-10, -11, -12, -20, -21]
    assert whole.topk is not None and whole.routed_experts is not None
    assert whole.topk.ids[:, 0].tolist() == [10, 11, 12, 20, 21]
    assert whole.topk.log_probs[:, 1].tolist() == [-10, -11, -12, -20, -21]
    assert whole.routed_experts.indices.shape == (2 + 5 - 1, 3, 2)
    assert whole.routed_experts.indices[:, 1, 1].tolist() == [10, 11, 12, 13, 20, 21]
    assert (whole.finish_reason, whole.num_moves) == ("stop", 1)
    moved = dataclasses.replace(OLD, num_moves=2, num_retractions=1, num_cached_tokens=2)
    whole = join_parts(moved, dataclasses.replace(NEW, num_retractions=3, num_cached_tokens=5))
    assert (whole.num_moves, whole.num_retractions, whole.num_cached_tokens) == (3, 4, 7)
    assert join_parts(dataclasses.replace(OLD, routed_experts=None), NEW).routed_experts is None
    assert join_parts(OLD, dataclasses.replace(NEW, topk=None)).topk is None


Spans = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("old", "observation", "new", "expected"),
    [
        ([(0, 1, 4), (1, 3, 5)], 0, [(0, 2, 6)], [(0, 1, 4), (1, 3, 5), (3, 5, 6)]),
        ([(0, 1, 4), (1, 3, 5)], 0, [(0, 1, 5), (1, 2, 6)], [(0, 1, 4), (1, 4, 5), (4, 5, 6)]),
        ([(0, 3, 5)], 0, [(0, 2, 5)], [(0, 5, 5)]),
        ([], 0, [(0, 2, 5)], [(0, 2, 5)]),
        ([(0, 3, 5)], 0, [], [(0, 3, 5)]),
        ([(0, 3, 5)], 2, [(0, 2, 5)], [(0, 3, 5), (5, 7, 5)]),  # no version sampled the observation
    ],
)
def test_spans_of_one_version_that_meet_become_one(
    old: Spans, observation: int, new: Spans, expected: Spans
) -> None:
    """Also if a response moved, or if a hold without a push interrupted it."""
    parts = []
    for first, spans in ((10, old), (20, new)):
        found = tuple(WeightVersionSpan(*span) for span in spans)
        parts.append(_part(first, found[-1].stop if found else 0, num_rows=0, spans=found))
    between = [7, 8][:observation]
    before = with_observation(parts[0], torch.tensor(between)) if between else parts[0]
    whole = join_parts(before, parts[1])
    assert [(span.start, span.stop, span.version) for span in whole.weight_versions] == expected
    sampled = [parts[0].tokens.tolist(), between, parts[1].tokens.tolist()]
    assert whole.tokens.tolist() == [token for part in sampled for token in part]
    assert mask_of(whole).tolist() == [part is not between for part in sampled for _ in part]


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
def test_the_loss_mask_is_the_mask_of_both_parts(
    of_old: torch.Tensor | None, of_new: torch.Tensor | None, expected: list[bool] | None
) -> None:
    old, new = dataclasses.replace(OLD, loss_mask=of_old), dataclasses.replace(NEW, loss_mask=of_new)
    assert join_parts(old, new).loss_mask.tolist() == expected


def test_a_shortened_response_keeps_the_spans_and_rows_of_its_tokens() -> None:
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


def test_a_resumed_request_counts_its_new_tokens_alone() -> None:
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


def test_an_engine_adds_to_the_counts_of_the_part_before() -> None:
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
def test_a_resumed_request_asks_for_the_rest(version: str) -> None:
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
def test_a_reply_from_the_queue_keeps_the_earlier_tokens(version: str) -> None:
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
