"""Responses that a server retracted: kept with routes of the weights that sampled them, and counted."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    give_up,
    with_observation,
    with_prompt,
)
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.protocol import GENERATIONS, NEWEST
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.scoring import Fault, Scorer
from megatron_dppo.routing_replay.routes import validate_routes
from megatron_dppo.types import Sample
from tests.support.collecting import Collected, collect
from tests.support.samples import InProcessScorer, assert_same
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
def test_a_retracted_sample_is_kept_and_counted(captures: bool) -> None:
    with StandIn(num_retractions=lambda rid: RETRACTED.get(rid, 0)).running() as server:
        engine = SglangEngine(server.url, MODEL)
        batch = _collected(engine, replace(PARAMS, capture_routes=captures))
    assert len(batch.samples) == 12 and not dropped(batch)
    assert all((sample.routed_experts is None) == (not captures) for sample in batch.samples)
    assert batch.counts.num_retractions == engine.counts.num_retractions == 5
    assert engine.counts.num_without_routes == 0
    totals = batch.counts.with_totals(2 * batch.counts.to_tensor())  # of two ranks that are alike
    assert totals.metrics()["rollout/retractions"] == 10
    assert totals.metrics()["rollout/recomputed_routes"] == 6 * captures


@pytest.mark.parametrize(
    ("num_retractions", "reason"), [(0, "invalid_routes"), (1, "retracted"), (2, "retracted")]
)
def test_a_sample_without_routes_is_dropped(num_retractions: int, reason: str) -> None:
    rewards = InProcessScorer(lambda prompt, response, finish_reason: RewardResult(1.0))
    scorer = Scorer(TOKENIZER, rewards, needs_routes=True, validate_routes=None)
    completion = replace(_read(FRESH), routed_experts=None, num_retractions=num_retractions)
    fault = asyncio.run(scorer.score(PROMPTS[0], with_prompt(completion, FRESH), None))
    assert isinstance(fault, Fault) and fault.reason == reason
    assert ("sglang.max_running_requests" in str(fault)) == (reason == "retracted")


def _read(request: Request, **of_answer: Any) -> Sample:
    generation = GENERATIONS[NEWEST]
    body = answer(generation.generate_body(request, PARAMS, MODEL), **of_answer)
    return asyncio.run(generation.read_reply(json.dumps(body).encode(), request, PARAMS, MODEL))


FRESH = Request("g+0", (1, 2), (0, 0, 0))


@pytest.mark.parametrize("retracted", [(2, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("changed", [(False, False, False), (True, True, False), (False, False, True)])
def test_resumed_response_keeps_the_routes_of_each_part(
    retracted: tuple[int, ...], changed: tuple[bool, ...]
) -> None:
    request, sizes = FRESH, (2, 2, None)
    whole = None
    for times, is_changed, num_tokens in zip(retracted, changed, sizes, strict=True):
        whole = _read(request, num_retractions=times, num_tokens=num_tokens, changed_at=int(is_changed))
        request = replace(FRESH, partial=whole)
    assert whole is not None and (whole.tokens.numel(), whole.finish_reason) == (6, "length")
    assert whole.num_retractions == sum(retracted)
    is_lost = any(times and is_changed for times, is_changed in zip(retracted, changed, strict=True))
    assert (whole.routed_experts is None) == is_lost
    if whole.routed_experts is not None:
        assert whole.routed_experts.indices[:, 0, 0].tolist() == list(range(2 + 6 - 1))


@pytest.mark.parametrize("partial_tokens", [0, 2])
def test_a_retracted_request_that_is_aborted_in_the_queue_keeps_its_earlier_tokens(partial_tokens: int) -> None:
    """SGLang's reply then has the tokens that it had sent, and no other facts about the request."""
    request = FRESH
    if partial_tokens:
        request = replace(FRESH, partial=_read(FRESH, num_tokens=partial_tokens))
    body = answer(GENERATIONS[NEWEST].generate_body(request, PARAMS, MODEL), num_tokens=1)
    kept = ("id", "finish_reason", "weight_versions", "completion_tokens", "output_token_logprobs")
    body["meta_info"] = {name: body["meta_info"][name] for name in kept}
    found = asyncio.run(GENERATIONS[NEWEST].read_reply(json.dumps(body).encode(), request, PARAMS, MODEL))
    assert (found.finish_reason, found.tokens.numel()) == ("abort", partial_tokens)
    assert_same(found, give_up(request))


def test_a_conversation_stays_retracted_from_turn_to_turn() -> None:
    turn = _read(FRESH, num_retractions=1, num_tokens=2)
    said = with_observation(turn, turn.tokens[:1])
    assert _read(replace(FRESH, partial=said)).num_retractions == 1


def test_engine_counts_add_up_over_calls() -> None:
    retracted = {"rollout0/c/8+0": 1}
    server = StandIn(lambda rid: retracted.get(rid, 0), fails_first=lambda rid: rid.endswith("a/0+1"))
    with server.running():
        engine = SglangEngine(server.url, MODEL, Patience(first_pause_s=0.01))
        assert engine.counts == EngineCounts()
        _collected(engine, PARAMS)
        first = engine.counts
        _collected(engine, PARAMS)
    asked = EngineCounts(num_prompt_tokens=12 * 7, num_cached_tokens=12, num_retractions=1)
    assert engine.counts - first == asked
    assert first == asked + EngineCounts(num_retries=1, num_maybe_sampled_twice=1)
