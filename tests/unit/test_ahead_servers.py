"""Sampling ahead from servers that die, hang, or come back with old weights, at bad moments."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.scheduling import run_to_end
from megatron_dppo.rollout.staleness import StalenessBound
from tests.support.processes import wait_until
from tests.support.ranks_on_threads import Meeting, Peer
from tests.support.sglang_stand_in import MODEL, LiveStandIn, serving
from tests.unit.test_ahead import PROMPTS, Rank, place_of

NUM_VERSIONS = 5
ANSWER_S, LONG_S = 5.0, 600.0  # limits of a call to a server that hangs, and of a response
PATIENCE = Patience(
    connect_timeout_s=60.0,
    control_timeout_s=ANSWER_S,
    generate_timeout_s=LONG_S,
    max_attempts=2,
    first_pause_s=0.01,
)
BOUND = StalenessBound(3, 2, 2.5)


class ServedRank(Rank):
    """One rank, which pushes versions to the servers that respond."""

    def __init__(self, servers: list[LiveStandIn], **options: Any) -> None:
        self.servers, self.hold_s = servers, 0.0
        self.served = SglangEngine([server.url for server in servers], MODEL, PATIENCE)
        super().__init__(BOUND, Peer(0, Meeting(1)), engine=cast(Any, self.served), **options)

    def push(self, version: int, num_left: int) -> None:
        started = time.monotonic()
        with self.ahead.pause(version, num_left):
            self.hold_s = max(self.hold_s, time.monotonic() - started)
            reached = [server for server in self.servers if server.answers]
            await_idle(reached)  # a server sees later than we do that we closed a connection
            for server in reached:
                server.version = version
            self.served.admit([server.url for server in reached], version)


def await_idle(servers: list[LiveStandIn]) -> None:
    wait_until(lambda: not any(server.running_ids for server in servers if server.answers), 120)


@pytest.fixture
def servers() -> Iterator[list[LiveStandIn]]:
    found = [LiveStandIn(token_s=0.03) for _ in range(2)]
    with serving(*found):
        yield found


def dies(server: LiveStandIn, at: str) -> None:
    if at == "die":
        server.stop()


def hangs(server: LiveStandIn, at: str) -> None:
    {"die": server.hang, "return": server.wake}.get(at, lambda: None)()


def dies_and_returns_with_old_weights(server: LiveStandIn, at: str) -> None:
    if at == "die":
        server.stop()
        server.version = 0
        server.start()


@pytest.mark.parametrize("path", ["/generate", "/abort_request"], ids=["in generation", "in a hold"])
@pytest.mark.parametrize("harm", [dies, hangs, dies_and_returns_with_old_weights])
def test_faulty_server_loses_no_prompt_and_keeps_the_bound(
    servers: list[LiveStandIn],
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[LiveStandIn, str], None],
    path: str,
) -> None:
    """The other server continues; the next push finds the one that responds again."""
    first, harmed_at = servers[0], list[int]()  # the version that it had

    def before(called: str, number: int) -> None:
        if called == path and rank.served.weight_version >= 1 and not harmed_at:
            harmed_at.append(first.version)
            harm(first, "die")

    rank = ServedRank(servers)
    first.before = before
    trained = list[int]()
    rank.push(0, NUM_VERSIONS)
    for version in range(NUM_VERSIONS):
        found = rank.ahead.next(version, version, rank.peer.all_gather, run_to_end)
        assert found is not None
        groups, counts = found
        assert counts.num_dropped_samples == 0
        trained += [place_of(group.samples[0].id) for group in groups]
        for sample in (sample for group in groups for sample in group.samples):
            assert all(
                version - BOUND.max_staleness <= span.version <= version for span in sample.weight_versions
            )
        if version == 3:
            harm(first, "return")
        time.sleep(0.05)
        rank.push(version + 1, NUM_VERSIONS - version - 1)
    cursor = rank.ahead.cursor
    rank.ahead.close()
    assert harmed_at
    assert rank.hold_s < LONG_S / 4
    assert first.version == (harmed_at[0] if harm is dies else NUM_VERSIONS)  # what the last push did
    top, again = PromptStream(PROMPTS, 0, shuffle=False, cursor=cursor).upcoming
    assert sorted([*trained, *again]) == list(range(top))
    assert len(set(trained)) == len(trained) == NUM_VERSIONS * BOUND.prompts_per_rollout
    await_idle(servers)


def test_no_server_left_is_raised_by_each_wait_and_by_no_push(servers: list[LiveStandIn]) -> None:
    """The ranks wait together, and so end together; a push of one alone would have no others."""
    rank = ServedRank(servers)
    rank.push(0, 9)
    for server in servers:
        server.stop()
    with pytest.raises(ServerError, match=r"no connection|broken response"):
        rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
    with rank.ahead.pause(1, 8):
        pass
    with pytest.raises(ServerError):
        rank.ahead.next(1, 1, rank.peer.all_gather, run_to_end)
    started = time.monotonic()
    rank.ahead.close()
    assert time.monotonic() - started < LONG_S / 4


def test_unresponsive_sampling_thread_is_an_error(
    monkeypatch: pytest.MonkeyPatch, servers: list[LiveStandIn]
) -> None:
    rank, may_go_on = ServedRank(servers), threading.Event()
    rank.push(0, 9)
    thread: Any = rank.ahead._loop  # pyright: ignore[reportPrivateUsage]
    thread._loop.call_soon_threadsafe(may_go_on.wait)  # a tokenizer that never returns, say
    monkeypatch.setattr("megatron_dppo.rollout.scheduling._ANSWER_S", 0.2)
    with pytest.raises(RolloutError, match=r"'progress' within 0\.2 s"):
        rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
    monkeypatch.undo()
    may_go_on.set()
    rank.ahead.close()
