"""A real server whose cache is too small for what it is asked: retractions are counted, and cost the routes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.server import Server, plan_launch
from tests.support.comparing import PARITY, compare, requests_of
from tests.support.serving import KEY, MODEL, START_TIMEOUT_S, TIGHT, Served, served_config

PARAMS = SamplingParams(150, num_topk_log_probs=20, capture_routes=True)


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[SglangEngine]:
    """Of a server beside the shared one, with the cache of one long response.

    Whether that cache overflows depends on how far apart requests come in, so SGLang's own switch also retracts
    a request in every fiftieth batch.
    """
    config = served_config(served.folder, served.run, **TIGHT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "50")
        server = Server(plan_launch(config), served.run / "servers", "tight")
    try:
        record = server.start(START_TIMEOUT_S)
        assert record is not None
        yield SglangEngine(record.url, MODEL, api_key=KEY)
    finally:
        server.stop(grace_s=0)


@pytest.mark.parametrize("captures", [True, False])
def test_retracted_responses_lose_their_routes_and_nothing_else(
    served: Served, engine: SglangEngine, captures: bool
) -> None:
    params, before = replace(PARAMS, capture_routes=captures), engine.counts
    requests = requests_of(f"tight{captures}", num_prompts=12, samples=1)
    completions = engine.generate(requests, params)
    retracted = [completion for completion in completions if completion.num_retractions]
    print(f"{len(retracted)} of {len(completions)} responses were retracted")
    assert retracted
    for request, completion in zip(requests, completions, strict=True):
        has_routes = completion.routed_experts is not None
        assert has_routes == (captures and not completion.num_retractions)
        of_this = replace(params, capture_routes=has_routes)
        assert max(compare(served, [request], [completion], of_this)) <= PARITY
    found = engine.counts - before
    assert found.num_retractions == sum(completion.num_retractions for completion in retracted)
    assert found.num_without_routes == (len(retracted) if captures else 0)
