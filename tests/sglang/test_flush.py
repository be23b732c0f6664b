"""How servers respond to a request to flush their prefix cache, which has keys and values of older weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.client import Call, Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.errors import ServerError
from tests.support.comparing import FULL, PARITY, compare, requests_of
from tests.support.processes import wait_until
from tests.support.serving import (
    KEY,
    MODEL,
    VERSION,
    Served,
    num_requests,
    server_of,
)

IN_PLACE = Call(
    "/pause_generation", {"mode": "in_place"}
)  # requests stay in the batch; a run never uses this mode
PATIENCE = Patience(control_timeout_s=60, generate_timeout_s=600, max_attempts=1)


@pytest.fixture
def own(served: Served) -> Iterator[Served]:
    """One more server of the same weights, for one test; it may end."""
    with server_of(served.folder, served.run, "flushed") as (_, record):
        yield Served(record.url, served.folder, served.model, served.run)


def _push(served: Served, fleet: Fleet, version: int) -> None:
    """Load the served weights again, as another version; the last call of a push flushes, and so does this."""
    fleet.tell(lambda member: member.calls.from_disk(str(served.folder), version))


@pytest.mark.usefixtures("changes_weights")
def test_a_push_leaves_no_prefix_in_the_cache(served: Served) -> None:
    engine = SglangEngine(served.url, MODEL, PATIENCE, api_key=KEY)
    cached: list[int] = []
    for name in ("first", "again", "pushed"):
        if name == "pushed":
            fleet = Fleet([Member(served.url, 0, 1, VERSION)], KEY, 300)
            fleet.tell(lambda member: member.calls.pause)
            _push(served, fleet, 1)
            fleet.tell(lambda member: member.calls.go_on)
            assert not fleet.failures
            engine.admit([served.url], 1)
        requests, before = requests_of(f"flush-{name}", num_prompts=1, samples=1, length=77), engine.counts
        completions = engine.generate(requests, FULL)
        cached.append((engine.counts - before).num_cached_tokens)
        assert max(compare(served, requests, completions, FULL)) <= PARITY
    assert cached[1:] == [76, 0]


def test_refused_flush_fails_the_push_while_requests_run(own: Served) -> None:
    """Old keys and values must not be used with new weights: the server reports that it kept them, or exits."""
    engine = SglangEngine(own.url, MODEL, PATIENCE, api_key=KEY)
    fleet = Fleet([Member(own.url, 0, 1, VERSION)], KEY, 300)
    requests = requests_of("beside", num_prompts=8, samples=1)
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(engine.generate, requests, SamplingParams(400, temperature=0.1))
        wait_until(lambda: num_requests(own) > 0, 300)
        fleet.tell(lambda member: IN_PLACE)
        _push(own, fleet, 1)
        assert list(fleet.failures) == [own.url]
        assert "the cache was not flushed because requests are still running" in fleet.failures[own.url]
        again = Fleet([Member(own.url, 0, 1, VERSION)], KEY, 300)
        again.tell(lambda member: member.calls.go_on)
        with suppress(ServerError):  # the completions have tokens of weights that were not requested
            sampling.result(600)
    wait_until(lambda: num_requests(own) == 0, 300)
    _push(own, again, 2)
    assert not again.failures
