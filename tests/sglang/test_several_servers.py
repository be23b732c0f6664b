"""One engine over two real servers: what is sent where, and what becomes of it when one of them fails."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.server import Server
from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.rollouts import build_engine
from megatron_dppo.types import Sample
from tests.support.serving import KEY, MODEL, Served, served_config, server_of

# A server that hangs is drained after 20 s, long before a response is late.
PATIENCE = Patience(control_timeout_s=20, generate_timeout_s=1200, max_attempts=1)
LONG = SamplingParams(300, temperature=0.5)


@dataclass(frozen=True)
class Other:
    """A second server, which tests may stop, restart and end."""

    server: Server
    url: str
    pid: int

    def send(self, number: int) -> None:
        os.killpg(self.pid, number)


@pytest.fixture(scope="module")
def other(served: Served) -> Iterator[Other]:
    with server_of(served.folder, served.run, "other") as (server, record):
        yield Other(server, record.url, record.pid)


def _requests(name: str, num_groups: int = 12, samples: int = 4) -> list[Request]:
    return [
        Request(f"{name}/{g}+{k}", (5 + g, 6, 7, 8), (0, 0, g * samples + k))
        for g in range(num_groups)
        for k in range(samples)
    ]


def _engine(served: Served, other: Other, **options: Any) -> SglangEngine:
    return SglangEngine([served.url, other.url], MODEL, PATIENCE, api_key=KEY, **options)


def _is_whole(requests: Sequence[Request], completions: Sequence[Sample]) -> bool:
    """Whether each request was answered, once, in order."""
    ids = [completion.request_id for completion in completions]
    return ids == [request.id for request in requests] and all(c.tokens.numel() for c in completions)


def _send_after(monkeypatch: pytest.MonkeyPatch, other: Other, number: int, num_requests: int) -> None:
    """Send the server a signal just before it is sent its request of that number."""
    generate, sent = SglangClient.generate, list[str]()

    async def counted(self: SglangClient, body: Any, *rest: Any) -> object:
        sent.append(self.url)
        if self.url == other.url and sent.count(other.url) == num_requests:
            await asyncio.sleep(0.1)  # the others are on their way
            other.send(number)
        return await generate(self, body, *rest)

    monkeypatch.setattr(SglangClient, "generate", counted)


def _post(url: str, path: str, body: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx2.post(url + path, json=body, headers=headers, timeout=300, trust_env=False).status_code == 200


def test_a_run_uses_all_servers_that_registered(served: Served, other: Other) -> None:
    config = served_config(served.folder, served.run)
    engine = build_engine(config, served.folder, torch.device("cpu"))
    assert isinstance(engine, SglangEngine)
    assert set(engine.urls) == {served.url, other.url}
    assert engine.weight_version == 0


def test_both_servers_respond_within_their_request_limits(
    served: Served, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, most, total = dict[str, int](), dict[str, int](), dict[str, int]()
    generate = SglangClient.generate

    async def counted(self: SglangClient, body: Any, *rest: Any) -> object:
        now[self.url] = now.get(self.url, 0) + 1
        total[self.url] = total.get(self.url, 0) + 1
        most[self.url] = max(most.get(self.url, 0), now[self.url])
        try:
            return await generate(self, body, *rest)
        finally:
            now[self.url] -= 1

    monkeypatch.setattr(SglangClient, "generate", counted)
    requests = _requests("both")
    engine = _engine(served, other, max_concurrent_requests=5)
    assert _is_whole(requests, engine.generate(requests, SamplingParams(16)))
    assert most == {served.url: 5, other.url: 5}
    assert sum(total.values()) == len(requests) and min(total.values()) > 5  # more than at once
    assert engine.counts.num_requeued == 0


def test_servers_report_what_they_have_to_do(served: Served) -> None:
    async def loads() -> tuple[list[int], int]:
        async with SglangClient(served.url, PATIENCE, api_key=KEY) as client:
            generation, _ = await client.connect()
            bodies = [generation.generate_body(request, LONG, MODEL) for request in _requests("load", 12)]
            tasks = [asyncio.create_task(client.generate(body)) for body in bodies]
            during = [0]
            async with asyncio.timeout(300):
                while max(during) < 32:
                    await asyncio.sleep(0.02)
                    during.append(generation.read_load(await client.loads()))
                await asyncio.gather(*tasks)
                while (after := generation.read_load(await client.loads())) > 0:  # its report lags behind
                    await asyncio.sleep(0.1)
            return during, after

    during, after = asyncio.run(loads())
    print(f"loads {during}, then {after}")
    assert 32 <= max(during) <= 48  # more than run at once: those that wait are counted
    assert after == 0


def test_a_server_that_hangs_is_drained_and_comes_back(
    served: Served, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _engine(served, other)
    other.send(signal.SIGSTOP)
    try:
        with caplog.at_level(logging.WARNING):
            requests = _requests("hang")
            assert _is_whole(requests, engine.generate(requests, SamplingParams(8)))
    finally:
        other.send(signal.SIGCONT)
    assert f"server {other.url} is drained: GET" in caplog.text
    assert engine.counts.num_requeued == 0
    caplog.clear()
    assert _is_whole(requests, engine.generate(requests, SamplingParams(8)))
    assert not caplog.text


def test_a_server_that_hangs_in_the_middle_gives_its_requests_to_others(
    served: Served, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = _engine(served, other), _requests("middle")
    _send_after(monkeypatch, other, signal.SIGSTOP, num_requests=5)
    started = time.monotonic()
    try:
        completions = engine.generate(requests, LONG)
    finally:
        other.send(signal.SIGCONT)
    assert time.monotonic() - started < PATIENCE.generate_timeout_s  # it is noticed before its replies are due
    assert _is_whole(requests, completions)
    assert engine.counts.num_requeued == sum(completion.num_moves for completion in completions) > 0
    assert (engine.counts.num_unanswered, engine.counts.num_refused_answers) == (0, 0)


def test_requests_go_to_servers_with_the_right_weights(
    served: Served, other: Other, caplog: pytest.LogCaptureFixture
) -> None:
    engine, requests = _engine(served, other), _requests("weights", num_groups=4)

    def versions() -> set[int]:
        completions = engine.generate(requests, SamplingParams(8))
        assert _is_whole(requests, completions)
        return {span.version for completion in completions for span in completion.weight_versions}

    _post(other.url, "/update_weight_version", {"new_version": "1"})
    try:
        assert versions() == {0}
        assert f"{other.url}: found weights of version 1; expected 0" in caplog.text
        undecided = _engine(served, other)
        with pytest.raises(ServerError, match="version 0; expected -2"):
            undecided.generate(requests, SamplingParams(8))
        undecided.admit([served.url], version=0)
        assert len(undecided.generate(requests, SamplingParams(8))) == len(requests)
        caplog.clear()
        engine.admit([other.url], version=1)
        assert engine.weight_version == 1
        assert versions() == {1}
        assert not caplog.text  # the other server is not even asked
        engine.admit([served.url], version=1)
        with pytest.raises(ServerError, match="version 0; expected 1"):
            engine.generate(requests, SamplingParams(8))
    finally:
        _post(other.url, "/update_weight_version", {"new_version": "0"})
    engine.admit(engine.urls, version=0)
    assert versions() == {0}


def test_a_server_that_registered_later_can_be_admitted(served: Served, other: Other) -> None:
    engine = SglangEngine(served.url, MODEL, PATIENCE, api_key=KEY)
    engine.admit([other.url], version=0)
    assert engine.urls == (served.url, other.url)
    requests = _requests("later", 2, 2)
    assert _is_whole(requests, engine.generate(requests, SamplingParams(8)))


def test_a_server_that_is_gone_at_the_start_is_left_out(served: Served) -> None:
    engine = SglangEngine(["http://127.0.0.1:1", served.url], MODEL, PATIENCE, api_key=KEY)
    requests = _requests("gone", 2, 2)
    assert _is_whole(requests, engine.generate(requests, SamplingParams(8)))


def test_a_server_that_dies_gives_its_requests_to_others(
    served: Served, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = _engine(served, other), _requests("dies")
    _send_after(monkeypatch, other, signal.SIGKILL, num_requests=5)
    completions = engine.generate(requests, LONG)
    assert _is_whole(requests, completions)
    assert engine.counts.num_requeued == sum(completion.num_moves for completion in completions) > 0
    assert (engine.counts.num_unanswered, engine.counts.num_refused_answers) == (0, 0)
    assert _is_whole(requests, engine.generate(requests, SamplingParams(8)))
    with pytest.raises(ServerError, match="no connection"):
        SglangEngine(other.url, MODEL, PATIENCE, api_key=KEY)
