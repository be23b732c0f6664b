"""Responses that are aborted and go on, against a forward pass of the whole."""

import dataclasses
from collections.abc import Callable, Sequence

import httpx2
import pytest
import torch

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.errors import RolloutError
from megatron_dppo.types import Sample, WeightVersionSpan
from tests.support.collecting import sample_until
from tests.support.comparing import PARITY, compare, requests_of
from tests.support.serving import KEY, MAX_TOKENS, MODEL, Served

PARAMS = SamplingParams(200, num_topk_log_probs=20, capture_routes=True)
PATIENCE = Patience(control_timeout_s=60, generate_timeout_s=600)


@pytest.fixture
def engine(served: Served) -> SglangEngine:
    return SglangEngine(served.url, MODEL, PATIENCE, api_key=KEY, max_concurrent_requests=48)


def _after(count: int) -> Callable[[Sample], bool]:
    """Whether so many responses are there."""
    seen: list[Sample] = []

    def is_enough(completion: Sample) -> bool:
        assert completion.finish_reason != "abort"
        seen.append(completion)
        return len(seen) >= count

    return is_enough


def _begun(requests: Sequence[Request], completions: Sequence[Sample]) -> list[Request]:
    """The requests that were aborted after some tokens, to go on with."""
    pairs = zip(requests, completions, strict=True)
    return [
        dataclasses.replace(request, partial=completion)
        for request, completion in pairs
        if completion.finish_reason == "abort" and completion.tokens.numel()
    ]


def _half_done(
    engine: SglangEngine, name: str, count: int, num_prompts: int = 4
) -> tuple[list[Sample], list[Request]]:
    """Completions when `count` responses had ended, and the requests of those that were half done.

    On a busy machine all that run may end before the rest is aborted. Then it sends others.
    """
    for attempt in range(5):
        requests = requests_of(f"{name}-{attempt}", num_prompts=num_prompts, samples=4)
        first = sample_until(engine, requests, PARAMS, _after(count))
        if begun := _begun(requests, first):
            return first, begun
    pytest.fail("every response ended before it could be aborted, five times")


def _set_version(served: Served, version: int) -> None:
    """Call the same weights by another version."""
    headers, body = {"Authorization": f"Bearer {KEY}"}, {"new_version": str(version)}
    answer = httpx2.post(
        f"{served.url}/update_weight_version", json=body, headers=headers, timeout=300, trust_env=False
    )
    assert answer.status_code == 200


def test_aborted_requests_resume_with_equal_tokens_and_log_probs(served: Served, engine: SglangEngine) -> None:
    first, begun = _half_done(engine, "go-on", 6, num_prompts=16)
    num_finished = sum(completion.finish_reason != "abort" for completion in first)
    num_not_begun = len(first) - num_finished - len(begun)
    print(f"{num_finished} finished, {len(begun)} half done, {num_not_begun} not begun")
    assert num_finished >= 6
    assert num_not_begun > 0  # more than run at once: some waited at the server, and some were not sent
    partials = [request.partial for request in begun if request.partial is not None]
    assert max(compare(served, begun, partials, PARAMS)) <= PARITY

    whole = engine.generate(begun, PARAMS)
    worst, worst_topk = compare(served, begun, whole, PARAMS)
    print(f"log-probs {worst:.1e}, top-20 {worst_topk:.1e}")
    assert max(worst, worst_topk) <= PARITY
    assert {completion.finish_reason for completion in whole} <= {"stop", "length"}
    for partial, completion in zip(partials, whole, strict=True):
        num_old = partial.tokens.numel()
        assert num_old < completion.tokens.numel() <= PARAMS.max_response_tokens
        assert torch.equal(completion.tokens[:num_old], partial.tokens)
        assert torch.equal(completion.log_probs[:num_old], partial.log_probs)
        assert completion.topk is not None and partial.topk is not None
        assert torch.equal(completion.topk.ids[:num_old], partial.topk.ids)
        assert completion.weight_versions == (WeightVersionSpan(0, completion.tokens.numel(), 0),)
        if completion.finish_reason == "length":
            assert completion.tokens.numel() == PARAMS.max_response_tokens
    assert (engine.counts.num_without_routes, engine.counts.num_refused_answers) == (0, 0)


def test_versions_of_the_weights_are_joined(served: Served, engine: SglangEngine) -> None:
    _, begun = _half_done(engine, "versions", 3)
    _set_version(served, 1)
    try:
        engine.admit(engine.urls, version=1)
        whole = engine.generate(begun, PARAMS)
    finally:
        _set_version(served, 0)
    assert max(compare(served, begun, whole, PARAMS)) <= PARITY
    for request, completion in zip(begun, whole, strict=True):
        assert request.partial is not None
        num_old, num_tokens = request.partial.tokens.numel(), completion.tokens.numel()
        assert completion.weight_versions == (
            WeightVersionSpan(0, num_old, 0),
            WeightVersionSpan(num_old, num_tokens, 1),
        )


def test_request_aborted_twice_resumes(served: Served, engine: SglangEngine) -> None:
    twice = list[Request]()
    for attempt in range(5):
        if not twice:
            _, begun = _half_done(engine, f"twice{attempt}", 2)
            twice = _begun(begun, sample_until(engine, begun, PARAMS, _after(2)))
    whole = engine.generate(twice, PARAMS)
    assert twice and max(compare(served, twice, whole, PARAMS)) <= PARITY


def test_response_with_lost_routes_resumes_without_routes(engine: SglangEngine) -> None:
    first = _half_done(engine, "lost", 3)[1][0]
    assert first.partial is not None
    lost = dataclasses.replace(first, partial=dataclasses.replace(first.partial, routed_experts=None))
    (completion,) = engine.generate([lost], PARAMS)
    assert completion.routed_experts is None
    assert engine.counts.num_without_routes == 1


def test_request_too_long_to_resume_is_refused_before_sampling(engine: SglangEngine) -> None:
    longest = SamplingParams(MAX_TOKENS - 2 - 40)  # of a prompt of 40: what the server takes, to the last token
    requests = requests_of("long", num_prompts=1, samples=1)
    engine.generate(requests, longest)
    with pytest.raises(RolloutError, match="506 tokens"):
        sample_until(engine, requests, longest, _after(1))


def test_a_partial_that_does_not_fit_is_refused(engine: SglangEngine) -> None:
    (request,) = requests_of("fit", num_prompts=1, samples=1)
    (whole,) = engine.generate([request], SamplingParams(4))
    with pytest.raises(RolloutError, match=r"0 log-probs .*1 to 199"):
        engine.generate([dataclasses.replace(request, partial=whole)], PARAMS)
