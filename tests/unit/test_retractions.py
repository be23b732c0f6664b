"""Responses that a server retracted: their routes are not trained on, and each retraction is counted."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron_dppo.engines.base import Completion, Request, SamplingParams, with_observation
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.protocol import GENERATIONS
from megatron_dppo.rewards import RewardResult
from megatron_dppo.routing_replay.routes import validate_routes
from tests.support.collecting import Collected, collect
from tests.support.samples import InProcessScorer
from tests.support.sglang_stand_in import MODEL, ROUTING, StandIn, answer
from tests.support.word_tokenizers import TOKENIZER
from tests.unit.test_collect import PROMPTS, dropped

PARAMS = SamplingParams(6, capture_routes=True)
RETRACTED = {"rollout0/a/0+1": 1, "rollout0/b/4+0": 3, "rollout0/b/4+2": 1}


def _collected(engine: SglangEngine, params: SamplingParams) -> Collected:
    return collect(
        engine,
        PROMPTS,
        TOKENIZER,
        InProcessScorer(lambda prompt, response, finish_reason: RewardResult(1.0)),
        params,
        samples_per_prompt=4,
        max_prompt_tokens=16,
        seed=0,
        rollout=0,
        validate_routes=partial(validate_routes, routing=ROUTING) if params.capture_routes else None,
    )


@pytest.mark.parametrize("captures", [True, False])
def test_a_retracted_sample_is_dropped_where_its_routes_were_captured(captures: bool) -> None:
    with StandIn(num_retractions=lambda rid: RETRACTED.get(rid, 0)).running() as server:
        engine = SglangEngine(server.url, MODEL)
        batch = _collected(engine, replace(PARAMS, capture_routes=captures))
    left = {sample.id for sample in batch.samples}
    assert len(left) == 12 - 3 * captures and left.isdisjoint(RETRACTED) == captures
    assert all((sample.routed_experts is None) == (not captures) for sample in batch.samples)
    assert dropped(batch) == ({"invalid_routes": 3} if captures else {})
    if captures:
        assert batch.counts.example is not None
        assert "sample rollout0/a/0+1: retracted once, routes recomputed" in batch.counts.example
        assert "sglang.mem_fraction_static" in batch.counts.example
    assert batch.counts.num_retractions == engine.counts.num_retractions == 5
    assert engine.counts.num_without_routes == 3 * captures
    totals = batch.counts.with_totals(2 * batch.counts.to_tensor())  # of two ranks that are alike
    assert totals.metrics()["rollout/retractions"] == 10
    assert totals.metrics()["rollout/dropped_invalid_routes"] == 6 * captures


def _read(request: Request, **of_answer: Any) -> Completion:
    generation = GENERATIONS["0.5.21"]
    body = answer(generation.generate_body(request, PARAMS, MODEL), **of_answer)
    return asyncio.run(generation.read_reply(json.dumps(body).encode(), request, PARAMS, MODEL))


FRESH = Request("g+0", (1, 2), (0, 0, 0))


@pytest.mark.parametrize(("first", "second", "third"), [(2, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 2), (0, 0, 0)])
def test_a_response_stays_retracted_however_often_it_is_resumed(first: int, second: int, third: int) -> None:
    """One that was only aborted and resumed keeps the routes that sampled it."""
    part = _read(FRESH, num_retractions=first, num_tokens=2)
    more = _read(replace(FRESH, partial=part), num_retractions=second, num_tokens=1)
    whole = _read(replace(FRESH, partial=more), num_retractions=third)
    assert (whole.tokens.numel(), whole.finish_reason) == (6, "length")
    assert whole.num_retractions == first + second + third
    assert (whole.routed_experts is None) == (first + second + third > 0)
    if whole.routed_experts is not None:
        assert whole.routed_experts.indices[:, 0, 0].tolist() == list(range(2 + 6 - 1))


def test_a_conversation_stays_retracted_from_turn_to_turn() -> None:
    turn = _read(FRESH, num_retractions=1, num_tokens=2)
    said = with_observation(turn, turn.tokens[:1])
    assert _read(replace(FRESH, partial=said)).num_retractions == 1


def test_what_the_engine_counts_adds_up_over_calls() -> None:
    retracted = {"rollout0/c/8+0": 1}
    server = StandIn(lambda rid: retracted.get(rid, 0), fails_first=lambda rid: rid.endswith("a/0+1"))
    with server.running():
        engine = SglangEngine(server.url, MODEL, Patience(first_pause_s=0.01))
        assert engine.counts == EngineCounts()
        _collected(engine, PARAMS)
        first = engine.counts
        _collected(engine, PARAMS)
    asked = EngineCounts(
        num_prompt_tokens=12 * 7, num_cached_tokens=12, num_retractions=1, num_without_routes=1
    )
    assert engine.counts - first == asked
    assert first == asked + EngineCounts(num_retries=1, num_maybe_sampled_twice=1)
