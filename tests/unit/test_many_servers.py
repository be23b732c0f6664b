"""Functions that call several servers: a faulty one is left out by its address, and the others stay."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.engines.sglang import client
from megatron_dppo.engines.sglang.client import Patience, SglangClient, connect
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.engines.weight_sync.probe import Probe
from tests.support.pushing import record_of, run_servers, runtime
from tests.support.sglang_stand_in import MODEL, serving
from tests.unit.test_probe import LIMITS, Scoring, trainer

LISTENING = ("odd list", "odd text", "no field", "refuses", "closes", "hung", "dies after a call")
"""States of a faulty server that listens at its address."""
STATES = ("absent", *LISTENING)
TIMEOUT_S = 8.0
Found = tuple[set[str], dict[str, str]]
"""Addresses of the servers that a function keeps, and why it left out others."""


@dataclass
class Faulty(Scoring):
    """Scores prompts as the trainer does, but for its state."""

    state: str = ""
    num_calls: int = 0
    facts: dict[str, object] = field(default_factory=dict[str, object])  # in its report, besides the usual ones
    meeting: threading.Barrier | None = None  # of the servers, each of which answers nothing before
    lock: threading.Lock = field(default_factory=threading.Lock)

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        with self.lock:
            self.num_calls += 1
            is_first = self.num_calls == 1
        if is_first and self.meeting is not None:
            self.meeting.wait(60)
        match self.state:
            case "odd list":
                return 200, [1, 2]
            case "odd text":
                return 200, "<html>"
            case "no field":
                return 200, {"status": "fine"}
            case "refuses":
                return 400, {"error": {"message": "as the test wants it"}}
            case "closes":
                return 0, None
            case "hung":
                while not is_gone():
                    threading.Event().wait(0.02)
                return 0, None
            case "dies after a call":
                if not is_first:
                    threading.Thread(target=self.stop).start()
                    return 0, None
            case _:
                pass
        if "memory_occupation" in path:
            return 200, {"success": True}
        status, content = super().respond(path, body, is_gone)
        return status, {**content, **self.facts} if path == "/server_info" else content


def members(servers: list[Faulty]) -> list[Member]:
    return [Member(server.url, pid, 1, "0.5.23") for pid, server in enumerate(servers)]


def paused(servers: list[Faulty], folder: Path) -> Found:
    fleet = Fleet(members(servers), None, TIMEOUT_S)
    for _ in range(2):  # one may die between two calls
        fleet.tell(lambda member: member.calls.pause)
    return {member.url for member in fleet.members}, fleet.failures


def described(servers: list[Faulty], folder: Path) -> Found:
    owner = run_servers([record_of(server) for server in servers], folder)
    fleet, absent = owner.fleet()
    fleet.tell(lambda member: member.calls.pause)  # a push begins with both; one may die between them
    return {member.url for member in fleet.members}, absent | fleet.failures


def compared(servers: list[Faulty], folder: Path) -> Found:
    made: Any = runtime()
    probe = Probe(trainer, MODEL, made, limits=LIMITS, seed=0, api_key=None, timeout_s=TIMEOUT_S)
    metrics = probe.run(members(servers))
    assert metrics["sync/probe_abs_diff_max"] < 1e-6
    return {server.url for server in servers if server.url not in probe.failures}, probe.failures


def connected(servers: list[Faulty], folder: Path) -> Found:
    patience, faults = Patience(control_timeout_s=TIMEOUT_S, first_pause_s=0.01), dict[str, str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            url, fault = record.args or ("", "")
            faults[str(url)] = str(fault)

    async def work() -> set[str]:
        async with AsyncExitStack() as stack:
            clients = [SglangClient(server.url, patience) for server in servers]
            return set(await connect([await stack.enter_async_context(each) for each in clients], version=0))

    client.logger.addHandler(handler := Handler())
    try:
        return asyncio.run(work()), faults
    finally:
        client.logger.removeHandler(handler)


@pytest.fixture
def four() -> Iterator[list[Faulty]]:
    servers = [Faulty() for _ in range(4)]
    with serving(*servers):
        yield servers


CALLS = [(described, state) for state in STATES] + [(compared, state) for state in STATES]
CALLS += [(connected, state) for state in STATES]
CALLS += [(paused, state) for state in ("absent", "refuses", "closes", "hung", "dies after a call")]


@pytest.mark.parametrize(("function", "state"), CALLS)
@pytest.mark.parametrize("number", [0, 2])
def test_a_faulty_server_is_left_out_by_its_address(
    function: Callable[..., Found], state: str, number: int, four: list[Faulty], tmp_path: Path
) -> None:
    faulty = four[number]
    faulty.state = state
    if state == "absent":
        faulty.stop()
    left, faults = function(four, tmp_path)
    assert left == {server.url for server in four if server is not faulty}
    assert set(faults) == {faulty.url} and faulty.url in faults[faulty.url]


@pytest.mark.parametrize("function", [paused, described, compared, connected])
def test_no_server_waits_for_another_one(
    function: Callable[..., Found], four: list[Faulty], tmp_path: Path
) -> None:
    """None replies before all were called. If they were called in turn, each would be given up."""
    meeting = threading.Barrier(len(four))
    for server in four:
        server.meeting = meeting
    left, faults = function(four, tmp_path)
    assert (len(left), faults) == (4, {}) and not meeting.broken
