"""A server that restarted at its URL is another server: it is known by its process, not by its address."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.engines.weight_sync import broadcast
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.engines.weight_sync.syncs import SglangSync
from tests.support.pushing import record_of, run_servers, runtime, sync_to
from tests.support.sglang_stand_in import StandIn, serving

RESTARTS = [{"pid": 8}, {"since": "2026-01-01T00:00:09+00:00"}]
"""A server process of another id, and one with the same id, as each has in its container."""
each_restart = pytest.mark.parametrize("change", RESTARTS, ids=str)


@dataclass
class Recording(StandIn):
    """Keeps the paths of the calls that change a server, with what they name."""

    changed: list[str] = field(default_factory=list[str])

    def respond(self, path: str, body: dict[str, Any], is_gone: Any) -> tuple[int, Any]:
        if "memory_occupation" in path:
            self.changed.append(f"{path.removesuffix('_memory_occupation')} {' '.join(body['tags'])}")
            return 200, {"success": True}
        return super().respond(path, body, is_gone)


@pytest.fixture
def servers() -> Iterator[list[Recording]]:
    found = [Recording(), Recording()]
    with serving(*found):
        yield found


@each_restart
def test_memory_is_resumed_only_at_the_process_that_released_it(
    change: dict[str, Any], servers: list[Recording], tmp_path: Path
) -> None:
    """Another process holds all its memory, and exits if it is to resume some. It releases it in its turn."""
    records = [record_of(server) for server in servers]
    owner = run_servers(records, tmp_path)
    owner.release()
    records[0] = record_of(servers[0], **change)
    fleet, _ = owner.fleet()
    owner.resume(fleet, "weights")
    assert [server.changed for server in servers] == [
        ["/release weights kv_cache"],
        ["/release weights kv_cache", "/resume weights"],
    ]
    again = run_servers(records, tmp_path)  # of a trainer that has resumed
    again.release()
    assert [server.changed[-1] for server in servers] == ["/release weights kv_cache", "/resume weights"]
    assert len(servers[0].changed) == 2
    assert len(json.loads((tmp_path / "released").read_text())) == 3


@each_restart
def test_a_server_that_restarts_during_a_push_is_pushed_to_again(
    change: dict[str, Any], servers: list[Recording], tmp_path: Path
) -> None:
    """The second round leaves out the servers that have the weights."""
    records = [record_of(server) for server in servers]
    owner = run_servers(records, tmp_path)
    updated, _ = owner.fleet()
    records[1] = record_of(servers[1], **change)
    left, _ = owner.fleet(without=updated.members)
    assert [member.url for member in left.members] == [servers[1].url]


@each_restart
def test_a_restarted_server_is_tried_before_it_samples(
    change: dict[str, Any], servers: list[Recording], tmp_path: Path
) -> None:
    """Whether its log-probs have the temperature: the first one was started otherwise, maybe."""
    records, tried = [record_of(server) for server in servers], list[list[str]]()

    def require_sampling(urls: Sequence[str]) -> dict[str, str]:
        tried.append(list(urls))
        return {}

    sync = sync_to(run_servers(records, tmp_path), require_sampling=require_sampling)
    sync.push(0)
    sync.push(1)
    records[1] = record_of(servers[1], **change)
    sync.push(2)
    assert tried == [[server.url for server in servers], [], [servers[1].url]]


@pytest.mark.parametrize(("failures", "pushes"), [(0, [[0, 1]]), (1, [[0, 1], [1]]), (9, [[0, 1], [1]])])
def test_a_server_that_fails_is_pushed_to_once_more(
    failures: int, pushes: list[list[int]], servers: list[Recording], tmp_path: Path
) -> None:
    """At the same version; then it waits for the next one, and the run goes on with the others."""
    urls, sent, admitted = [server.url for server in servers], list[list[int]](), list[tuple[list[str], int]]()

    def send(fleet: Any, version: int) -> None:
        assert version == 3
        sent.append([urls.index(member.url) for member in fleet.members])
        if len(sent) <= failures:
            fleet.fail(urls[1], "lost")

    owner = run_servers([record_of(server) for server in servers], tmp_path)
    sync = sync_to(owner, send=send, admit=lambda urls, version: admitted.append((list(urls), version)))
    sync.push(3)
    assert sent == pushes and admitted == [(urls[: 2 if failures < 2 else 1], 3)]


@pytest.mark.parametrize("untried", [0, 1])
def test_the_engine_samples_from_servers_whose_log_probs_were_tried(
    untried: int, servers: list[Recording], tmp_path: Path
) -> None:
    """A server that took the weights and does not reply to the trial waits for the next push."""
    urls, admitted = [server.url for server in servers], list[tuple[list[str], int]]()
    transport: Any = SimpleNamespace(needs_begin=False, send=lambda fleet, version: None)
    engine: Any = SimpleNamespace(admit=lambda urls, version: admitted.append((list(urls), version)))
    replies = iter([{urls[untried]: "no reply"}, {}])
    sync = SglangSync(
        transport,
        engine,
        run_servers([record_of(server) for server in servers], tmp_path),
        runtime(),
        probe=None,
        probe_every=1,
        require_sampling=lambda urls: next(replies),
    )
    assert [sync.push(version)["sync/servers"] for version in (5, 6)] == [1.0, 2.0]
    assert admitted == [([urls[1 - untried]], 5), (urls, 6)]


@pytest.mark.parametrize("change", [{}, *RESTARTS], ids=str)
def test_a_process_group_is_used_again_only_with_the_processes_that_joined_it(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted server has left all groups, and its URL is the same."""
    transport = broadcast.DistributedTransport(
        lambda: iter(()), 0, broadcast.StagePlace(0, 1, speaks=True), runtime(), bucket_bytes=1, timeout_s=1.0
    )
    joined, left = Member("http://127.0.0.1:9", 7, 1, "0.5.23", "then"), list[str]()
    group: Any = SimpleNamespace(members=(joined,), handle=None)
    transport._group = group
    monkeypatch.setattr(transport, "_leave", lambda: left.append("left"))
    monkeypatch.setattr(broadcast, "_reachable_host", lambda members: pytest.fail("joins again"))
    member = replace(joined, **change)
    if change:
        with pytest.raises(pytest.fail.Exception, match="joins again"):
            transport._join(Fleet([member], None, 1.0))
        assert left == ["left"]
    else:
        assert transport._join(Fleet([member], None, 1.0)) is group and left == []
