"""The client and the protocol against the real server."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.protocol import Generation, ServerFacts
from megatron_dppo.errors import ServerError
from megatron_dppo.types import Sample
from tests.support.serving import KEY, MAX_TOKENS, MODEL, VERSION, Served

PROMPT = (5, 6, 7, 8, 40, 41)
PATIENCE = Patience(control_timeout_s=60, generate_timeout_s=600)
Use = Callable[[SglangClient, Generation, ServerFacts], Coroutine[Any, Any, Any]]


def _run(served: Served, use: Use) -> Any:
    async def run() -> Any:
        async with SglangClient(served.url, PATIENCE, api_key=KEY) as client:
            return await use(client, *await client.connect())

    return asyncio.run(run())


async def _sample(
    client: SglangClient, generation: Generation, request: Request, params: SamplingParams
) -> Sample:
    content = await client.generate(generation.generate_body(request, params, MODEL))
    return await generation.read_reply(content, request, params, MODEL)


def test_server_facts_equal_the_served_model(served: Served) -> None:
    async def use(client: SglangClient, generation: Generation, facts: ServerFacts) -> ServerFacts:
        assert await client.is_healthy()
        return facts

    facts = _run(served, use)
    assert facts.model_path == str(served.folder)
    assert (facts.version, facts.weight_version, facts.captures_routes) == (VERSION, 0, True)
    assert facts.max_prompt_tokens < facts.max_tokens < MAX_TOKENS


def test_limits_equal_the_servers_limits(served: Served) -> None:
    async def use(client: SglangClient, generation: Generation, facts: ServerFacts) -> tuple[int, int]:
        lengths: list[int] = []
        for num_prompt in (400, facts.max_prompt_tokens):
            request = Request(f"limit/{num_prompt}", (7,) * num_prompt, (0, 0, 0))
            params = SamplingParams(facts.max_tokens - num_prompt)
            body = generation.generate_body(request, params, MODEL)
            body["sampling_params"]["ignore_eos"] = True
            answer: Any = json.loads(await client.generate(body))
            lengths.append(num_prompt + len(answer["output_ids"]))
        assert lengths == [facts.max_tokens] * 2
        too_long = Request("long", (7,) * (facts.max_prompt_tokens + 1), (0, 0, 0))
        with pytest.raises(ServerError, match="status 400"):
            await client.generate(generation.generate_body(too_long, SamplingParams(1), MODEL))
        return client.counts.num_retries, client.counts.num_maybe_sampled_twice

    assert _run(served, use) == (0, 0)


def test_an_aborted_request_keeps_what_it_has(served: Served) -> None:
    params = SamplingParams(400, num_topk_log_probs=5, capture_routes=True)

    async def use(client: SglangClient, generation: Generation, facts: ServerFacts) -> list[Sample]:
        requests = [Request(f"abort/{i}", PROMPT, (0, 0, i)) for i in range(8)]
        tasks = [asyncio.create_task(_sample(client, generation, request, params)) for request in requests]
        await asyncio.sleep(0.08)
        for request in requests:
            await client.abort(request.id)
        return await asyncio.gather(*tasks)

    completions: list[Sample] = _run(served, use)
    aborted = [completion for completion in completions if completion.finish_reason == "abort"]
    assert aborted  # whichever did not end by itself before
    for completion in aborted:
        assert completion.tokens.numel() == completion.log_probs.numel() < 400
        if completion.tokens.numel():  # none of a request that was aborted while it waited
            assert completion.routed_experts is not None
            assert completion.routed_experts.indices.shape[0] == len(PROMPT) + completion.tokens.numel() - 1


def test_many_requests_at_once(served: Served) -> None:
    params = SamplingParams(8, num_topk_log_probs=20, capture_routes=True)

    async def use(client: SglangClient, generation: Generation, facts: ServerFacts) -> list[Sample]:
        requests = [Request(f"many/{i}", (5 + i, *PROMPT), (0, 0, i)) for i in range(64)]
        return await asyncio.gather(*(_sample(client, generation, request, params) for request in requests))

    completions: list[Sample] = _run(served, use)
    assert [completion.request_id for completion in completions] == [f"many/{i}" for i in range(64)]
    assert all(completion.routes_fault is None for completion in completions)


def test_without_the_key_the_server_refuses(served: Served) -> None:
    async def run() -> None:
        async with SglangClient(served.url, PATIENCE) as client:
            await client.connect()

    with pytest.raises(ServerError, match="status 401"):
        asyncio.run(run())
