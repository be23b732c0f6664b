"""Faults of servers that a real one does not show on demand: each request is answered once, or given up."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from megatron_dppo.engines.base import EngineCounts, Request, SamplingParams, response_alone
from megatron_dppo.engines.sglang import session as sessions
from megatron_dppo.engines.sglang.client import Link
from megatron_dppo.engines.sglang.dispatch import NEXT, Asked, Event, InFlight, Situation, State
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.engines.sglang.session import ServerSession
from megatron_dppo.errors import ReplyError, ServerError
from megatron_dppo.types import Sample, WeightVersionSpan

MODEL = ServedModel(97, 3, (0,), None)
FACTS = ServerFacts("0.5.23", "model", 0, 64, 64, False, 8, 1)
Answer = Callable[["Fake", str], Any]


class Fake:
    """A server, and the client and the protocol to speak with it; `answer` gives the version that sampled."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.is_dead, self.num_asked, self.counts = answer, False, 0, EngineCounts()
        self.aborts = Counter[str]()
        self.ended: dict[str, asyncio.Event] = {}
        self.rids = list[str]()

    async def generate(self, body: Mapping[str, Any], renew: Callable[[], str]) -> object:
        self.num_asked += 1
        self.rids.append(body["rid"])
        version = self.answer(self, body["rid"])
        await asyncio.sleep(0)
        if self.is_dead:
            raise ServerError("dead")
        if version == "endless":
            self.ended[body["rid"]] = asyncio.Event()
            await self.ended[body["rid"]].wait()
            return {**body, "finish": "abort", "version": 0}
        return {**body, "finish": "stop", "version": version}

    async def abort(self, rid: str) -> None:
        name, _, _ = rid.partition("#")
        self.aborts[name] += 1
        if self.aborts[name] == 2:  # the first came before the request did
            self.ended[rid].set()

    async def is_healthy(self) -> bool:
        return not self.is_dead

    async def loads(self) -> object:
        if self.is_dead:
            raise ServerError("dead")
        raise ReplyError("no load")

    def generate_body(self, request: Request, *_: Any) -> dict[str, Any]:
        return {"rid": request.id}

    async def read_reply(self, body: dict[str, Any], *_: Any) -> Sample:
        spans = (WeightVersionSpan(0, 1, body["version"]),)
        return response_alone(
            body["rid"], torch.ones(1).long(), torch.zeros(1), body["finish"], None, None, spans
        )


def _ask_all(
    names: Sequence[str], answers: Mapping[str, Answer], limit: int = 2, *, is_held: bool = False
) -> tuple[list[Sample], ServerSession, dict[str, Fake]]:
    fakes = {url: Fake(answer) for url, answer in answers.items()}
    links = {url: Link(cast(Any, fake), cast(Any, fake), FACTS) for url, fake in fakes.items()}
    requests = [Request(name, (1,), (0, 0, 0)) for name in names]

    async def run() -> tuple[list[Sample], ServerSession]:
        async with ServerSession(links, MODEL, 0, max_in_flight=limit, hold_timeout_s=300) as used:

            async def ask(request: Request) -> Sample:
                completion = await used.ask(request, SamplingParams(4))
                if is_held and not used.is_held:
                    await used.hold()
                return completion

            return await asyncio.gather(*map(ask, requests)), used

    completions, used = asyncio.run(run())
    assert [each.request_id for each in completions] == list(names)
    assert used.counts.num_unanswered == len(used.errors)
    assert used.counts.num_requeued == sum(each.num_moves for each in completions)
    return completions, used, fakes


def _sound(fake: Fake, rid: str) -> int:
    return 0


def _dies_of_poison(fake: Fake, rid: str) -> int:
    fake.is_dead |= rid.startswith("poison")
    return 0


def _dies_at_third(fake: Fake, rid: str) -> int:
    fake.is_dead |= fake.num_asked == 3
    return 0


NAMES = [f"g{group}+{k}" for group in range(10) for k in range(2)]


def test_a_server_sees_each_id_once() -> None:
    """SGLang cleans up behind an answer by its id, and would abort the next turn that had the same."""
    fake = Fake(_sound)

    async def turns() -> None:
        links = {"a": Link(cast(Any, fake), cast(Any, fake), FACTS)}
        for _ in range(2):
            async with ServerSession(links, MODEL, 0, max_in_flight=2, hold_timeout_s=300) as used:
                for _ in range(3):
                    completion = await used.ask(Request("talk+0", (1,), (0, 0, 0)), SamplingParams(4))
                    assert completion.request_id == "talk+0"

    asyncio.run(turns())
    assert len(set(fake.rids)) == 6
    assert not any(b.startswith(a) for a in fake.rids for b in fake.rids if a != b)


def test_what_a_dead_server_had_goes_to_others() -> None:
    completions, used, fakes = _ask_all(NAMES, {"a": _dies_at_third, "b": _sound})
    assert all(each.finish_reason == "stop" for each in completions)
    assert used.counts.num_requeued in (1, 2)
    assert fakes["a"].num_asked in (3, 4)
    assert sum(fake.num_asked for fake in fakes.values()) == len(NAMES) + used.counts.num_requeued


def test_a_request_that_ends_servers_does_not_end_them_all() -> None:
    names = ["poison+0", *NAMES]
    completions, used, fakes = _ask_all(names, dict.fromkeys("abcd", _dies_of_poison), limit=1)
    assert used.errors.keys() == {"poison+0"} and isinstance(used.errors["poison+0"], ServerError)
    assert (completions[0].finish_reason, completions[0].tokens.numel()) == ("abort", 0)
    assert sum(fake.is_dead for fake in fakes.values()) == 3
    assert all(each.finish_reason == "stop" for each in completions[1:])


def test_a_server_that_came_back_with_other_weights_is_drained() -> None:
    answers: dict[str, Answer] = {"a": lambda fake, rid: int(fake.num_asked > 3), "b": _sound}
    completions, used, fakes = _ask_all(NAMES, answers)
    assert all(each.weight_versions == (WeightVersionSpan(0, 1, 0),) for each in completions)
    assert 0 < used.counts.num_requeued <= 2
    assert fakes["a"].num_asked <= 5


def test_where_no_server_is_left_the_reason_is_told() -> None:
    with pytest.raises(ServerError, match="dead"):
        _ask_all(NAMES, dict.fromkeys("ab", _dies_at_third))


def test_an_abort_that_came_too_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_ABORT_AGAIN_S", 0.01)
    names = ["quick+0", "long+0", "long+1", "never+0"]
    completions, used, fakes = _ask_all(
        names,
        {"a": lambda fake, rid: 0 if rid.startswith("quick") else "endless"},
        limit=3,
        is_held=True,  # once the first is answered
    )
    assert [each.finish_reason for each in completions] == ["stop", "abort", "abort", "abort"]
    assert [each.tokens.numel() for each in completions] == [1, 1, 1, 0]  # the last was not sent
    assert not used.errors and used.counts.num_prompt_tokens == 3
    assert {name: fakes["a"].aborts[name] >= 2 for name in names[1:3]} == {"long+0": True, "long+1": True}


@pytest.mark.parametrize(
    ("event", "states"),
    [
        ("refused", ["dropped", "dropped", "dropped", "waiting"]),
        ("slow", ["dropped", "dropped", "dropped", "dropped"]),
        ("lost", ["given up", "failed", "dropped", "waiting"]),
    ],
)
@pytest.mark.parametrize(("place", "situation"), [*enumerate(["held", "no server", "last try", "open"])])
def test_each_event_brings_a_request_into_its_next_state(
    event: Event, states: list[State], place: int, situation: Situation
) -> None:
    """A request ends once, or is the next one to be sent; only a counted error is in `errors`."""
    reason, state = ServerError("reason"), states[place]

    async def move() -> None:
        links = {url: Link(cast(Any, Fake(_sound)), cast(Any, None), FACTS) for url in "ab"}
        used = ServerSession(links, MODEL, 0, max_in_flight=1, hold_timeout_s=300)
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


def test_requests_of_a_drained_server_are_sent_again_in_their_order_and_its_responses_are_kept() -> None:
    async def lose() -> None:
        links = {url: Link(cast(Any, Fake(_sound)), cast(Any, None), FACTS) for url in "ab"}
        used = ServerSession(links, MODEL, 0, max_in_flight=9, hold_timeout_s=300)
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
