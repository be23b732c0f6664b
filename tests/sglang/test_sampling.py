"""Settings of a real server that change the sampling: seeds of samples, and log-probs without temperature."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.engines.weight_sync.probe import require_temperature
from megatron_dppo.errors import WeightSyncError
from tests.support.serving import KEY, MODEL, START_TIMEOUT_S, Served, served_config

PARAMS = SamplingParams(24, temperature=0.8)
BEHIND_OUR_BACK = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    "SGLANG_EXPOSE_OWN_ENV_VARS": "0",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles the seeded sampling, which takes a minute on a CPU
}


@pytest.fixture(scope="module")
def url(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that somebody else started: it seeds samples, and leaves the temperature out of log-probs."""
    folder = tmp_path_factory.mktemp("sampling")
    config = served_config(served.folder, folder, enable_deterministic_inference=True)
    launch = plan_launch(config)
    launch = replace(launch, environment={**launch.environment, **BEHIND_OUR_BACK})
    server = Server(launch, folder / "servers", "foreign")
    try:
        record = server.start(START_TIMEOUT_S)
        assert record is not None
        yield record.url
    finally:
        server.stop(grace_s=0)


def requests(seed: int, order: list[int]) -> list[Request]:
    """Four samples to each of three prompts, in this order."""
    return [Request(f"{n // 4}+{n}", (5, 6, 7 + n // 4), (seed, 3, n)) for n in order]


def test_a_sample_depends_on_its_seed_and_not_on_the_batch(url: str) -> None:
    engine = SglangEngine(url, MODEL, api_key=KEY)

    def sampled(seed: int, order: list[int]) -> dict[str, tuple[int, ...]]:
        asked = requests(seed, order)
        return {c.request_id: tuple(c.tokens.tolist()) for c in engine.generate(asked, PARAMS)}

    first, again = sampled(1, list(range(12))), sampled(1, [11, 2, 7, 3, 0])
    assert {id: first[id] for id in again} == again
    assert len(set(first.values())) == 12, "samples of a group differ"
    assert not set(sampled(2, list(range(12))).values()) & set(first.values())


def test_interrupted_sample_resumes_with_equal_tokens(url: str) -> None:
    engine = SglangEngine(url, MODEL, api_key=KEY)
    (request,) = requests(1, [5])
    (whole,) = engine.generate([request], PARAMS)
    (part,) = engine.generate([request], replace(PARAMS, max_response_tokens=9))
    (rest,) = engine.generate([replace(request, partial=replace(part, finish_reason="abort"))], PARAMS)
    assert torch.equal(rest.tokens, whole.tokens)


def test_log_probs_without_the_temperature_are_found(url: str, served: Served) -> None:
    assert require_temperature([served.url], MODEL, KEY, 60.0) == {}
    with pytest.raises(WeightSyncError, match=r"1 times .*0\.5 times"):
        require_temperature([served.url, url], MODEL, KEY, 60.0)
