"""What a push does to requests on their way: a pause ends them with what they have, and holds new ones."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from tests.support.comparing import compare
from tests.support.processes import wait_until
from tests.support.serving import KEY, MODEL, VERSION, Served, num_requests

LONG = SamplingParams(400, num_topk_log_probs=5, capture_routes=True)


def _requests(name: str, count: int) -> list[Request]:
    return [Request(f"{name}+{i:02}", (5 + i, 6, 7, 8), (0, 0, i)) for i in range(count)]


@pytest.fixture
def engine(served: Served) -> SglangEngine:
    endless = replace(MODEL, end_tokens=())
    return SglangEngine(served.url, endless, Patience(generate_timeout_s=600), api_key=KEY)


def test_pause_aborts_requests_with_their_tokens_and_holds_new_ones(
    served: Served, engine: SglangEngine
) -> None:
    fleet = Fleet([Member(served.url, 0, 1, VERSION)], KEY, 300)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(engine.generate, _requests("before", 16), LONG)
        wait_until(lambda: num_requests(served) > 0, 300)
        time.sleep(0.5)
        fleet.tell(lambda member: member.calls.pause)
        try:
            begun = running.result(300)
            held = threads.submit(engine.generate, _requests("held", 4), SamplingParams(4))
            with suppress(TimeoutError):
                held.result(2)
            assert not held.done()
        finally:
            fleet.tell(lambda member: member.calls.go_on)
        assert [completion.tokens.numel() for completion in held.result(300)] == [4] * 4
    assert not fleet.failures
    assert "abort" in {completion.finish_reason for completion in begun}
    whole = [(r, c) for r, c in zip(_requests("before", 16), begun, strict=True) if c.tokens.numel() > 1]
    assert whole
    asked, answered = zip(*whole, strict=True)
    assert max(compare(served, asked, answered, LONG)) <= 5e-5
