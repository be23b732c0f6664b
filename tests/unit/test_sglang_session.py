"""The states of a request in a session: the transition table, and the requests of a drained server."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_dppo.engines.base import EngineCounts, Request, SamplingParams
from megatron_dppo.engines.sglang.client import Link
from megatron_dppo.engines.sglang.dispatch import NEXT, Asked, Event, InFlight, Situation, State
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.engines.sglang.session import ServerSession
from megatron_dppo.errors import ServerError

MODEL = ServedModel(97, 3, (0,), None)
FACTS = ServerFacts("0.5.23", "model", 0, 64, 64, False, 8, 1)


def _session() -> ServerSession:
    client = cast(Any, SimpleNamespace(counts=EngineCounts()))
    links = {url: Link(client, cast(Any, None), FACTS) for url in "ab"}
    return ServerSession(links, MODEL, 0, max_in_flight=9, hold_timeout_s=300)


@pytest.mark.parametrize(
    ("event", "states"),
    [
        ("refused", ["dropped", "dropped", "dropped", "waiting"]),
        ("slow", ["dropped", "dropped", "dropped", "dropped"]),
        ("lost", ["given up", "failed", "dropped", "waiting"]),
    ],
)
@pytest.mark.parametrize(("place", "situation"), [*enumerate(["held", "no server", "last try", "open"])])
def test_transition_table_moves_a_request_to_its_next_state(
    event: Event, states: list[State], place: int, situation: Situation
) -> None:
    """A request ends once, or is the next one to be sent; only a counted error is in `errors`."""
    reason, state = ServerError("reason"), states[place]

    async def move() -> None:
        used = _session()
        asked = Asked(Request("g+0", (1,), (0, 0, 0)), SamplingParams(4), asyncio.Future(), state="sent")
        used.is_held = situation == "held"
        used._fault = ServerError("drained") if situation == "no server" else None
        asked.num_moves = 2 if situation == "last try" else 1
        used._move(asked, event, reason)
        assert asked.state == state == NEXT[event, situation]
        assert list(used._waiting) == ([asked] if state == "waiting" else [])
        assert used.counts.num_requeued == (state == "waiting")
        assert used.errors == ({"g+0": reason} if state == "dropped" else {})
        assert asked.completion.done() == (state != "waiting")
        if state == "failed":
            assert str(asked.completion.exception()) == "drained"
        elif state != "waiting":
            assert (await asked.completion).finish_reason == "abort"

    asyncio.run(move())


def test_drained_server_requeues_requests_in_order_and_keeps_its_responses() -> None:
    async def lose() -> None:
        used = _session()
        requests = [Request(f"g+{k}", (1,), (0, 0, 0)) for k in range(4)]
        asked = [Asked(request, SamplingParams(4), asyncio.Future(), state="sent") for request in requests]
        tasks: list[Any] = [asyncio.create_task(asyncio.sleep(300 * (k != 1))) for k in range(4)]
        await asyncio.wait({tasks[1]})
        url = used._load_balancer.take("g") or ""
        for each, task in zip(asked, tasks, strict=True):
            used._load_balancer.take("g")
            used._in_flight[task] = InFlight(each, url)
        used._remove(url, ServerError("dead"))
        assert list(used._waiting) == [asked[0], asked[2], asked[3]]
        assert list(used._in_flight) == [tasks[1]] and asked[1].state == "sent"
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [task.cancelled() for task in tasks] == [True, False, True, True]

    asyncio.run(lose())
