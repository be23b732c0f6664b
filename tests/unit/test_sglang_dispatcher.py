"""Faults of servers that a real one does not show on demand: each request is answered once, or given up."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch

from megatron_dppo.errors import ReplyError, ServerError
from megatron_dppo.rollout.engine import Completion, IsEnough, Request, SamplingParams
from megatron_dppo.rollout.sglang import dispatcher
from megatron_dppo.rollout.sglang.dispatcher import Dispatcher, Link, RequestOutcome
from megatron_dppo.rollout.sglang.protocol import Reply, ServedModel

MODEL = ServedModel(97, 3, (0,), None)
Answer = Callable[["Fake", str], Any]


class Fake:
    """A server, and the client and the protocol to speak with it; `answer` gives the version that sampled."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.is_dead, self.num_asked = answer, False, 0
        self.aborts = Counter[str]()
        self.ended: dict[str, asyncio.Event] = {}

    async def generate(self, body: Mapping[str, Any]) -> object:
        self.num_asked += 1
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
        self.aborts[rid] += 1
        if self.aborts[rid] == 2:  # the first came before the request did
            self.ended[rid].set()

    async def is_healthy(self) -> bool:
        return not self.is_dead

    async def loads(self) -> object:
        if self.is_dead:
            raise ServerError("dead")
        raise ReplyError("no load")

    def generate_body(self, request: Request, *_: Any) -> dict[str, Any]:
        return {"rid": request.id}

    def read_reply(self, body: dict[str, Any], *_: Any) -> Reply:
        completion = Completion(
            body["rid"], torch.ones(1).long(), torch.zeros(1), body["finish"], None, None, ()
        )
        return Reply(completion, 0, 0, None, frozenset({body["version"]}))


def _dispatch_all(
    names: Sequence[str], answers: Mapping[str, Answer], limit: int = 2, is_enough: IsEnough | None = None
) -> tuple[list[RequestOutcome], dict[str, Fake]]:
    fakes = {url: Fake(answer) for url, answer in answers.items()}
    links = {url: Link(cast(Any, fake), cast(Any, fake), cast(Any, None)) for url, fake in fakes.items()}
    requests = [Request(name, (1,), (0, 0, 0)) for name in names]

    async def run() -> list[RequestOutcome]:
        return await Dispatcher(links, MODEL, 0, limit).run(requests, SamplingParams(4), is_enough)

    outcomes = asyncio.run(run())
    for request, each in zip(requests, outcomes, strict=True):
        assert not isinstance(each.answer, Reply) or each.answer.completion.request_id == request.id
    return outcomes, fakes


def _sound(fake: Fake, rid: str) -> int:
    return 0


def _dies_of_poison(fake: Fake, rid: str) -> int:
    fake.is_dead |= rid.startswith("poison")
    return 0


def _dies_at_third(fake: Fake, rid: str) -> int:
    fake.is_dead |= fake.num_asked == 3
    return 0


NAMES = [f"g{group}+{k}" for group in range(10) for k in range(2)]


def test_what_a_dead_server_had_goes_to_others() -> None:
    outcomes, fakes = _dispatch_all(NAMES, {"a": _dies_at_third, "b": _sound})
    assert all(isinstance(each.answer, Reply) for each in outcomes)
    assert sum(each.num_moves for each in outcomes) in (1, 2)
    assert fakes["a"].num_asked in (3, 4)
    assert sum(fake.num_asked for fake in fakes.values()) == len(NAMES) + sum(
        each.num_moves for each in outcomes
    )


def test_a_request_that_ends_servers_does_not_end_them_all() -> None:
    outcomes, fakes = _dispatch_all(["poison+0", *NAMES], dict.fromkeys("abcd", _dies_of_poison), limit=1)
    assert isinstance(outcomes[0].answer, ServerError)
    assert sum(fake.is_dead for fake in fakes.values()) == 3
    assert all(isinstance(each.answer, Reply) for each in outcomes[1:])


def test_a_server_that_came_back_with_other_weights_is_drained() -> None:
    outcomes, fakes = _dispatch_all(NAMES, {"a": lambda fake, rid: int(fake.num_asked > 3), "b": _sound})
    assert all(isinstance(each.answer, Reply) and each.answer.new_versions == {0} for each in outcomes)
    assert 0 < sum(each.num_moves for each in outcomes) <= 2
    assert fakes["a"].num_asked <= 5


def test_where_no_server_is_left_the_reason_is_told() -> None:
    with pytest.raises(ServerError, match="dead"):
        _dispatch_all(NAMES, dict.fromkeys("ab", _dies_at_third))


def test_an_abort_that_came_too_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_ABORT_AGAIN_S", 0.01)
    names = ["quick+0", "long+0", "long+1", "never+0"]
    outcomes, fakes = _dispatch_all(
        names,
        {"a": lambda fake, rid: 0 if rid.startswith("quick") else "endless"},
        limit=3,
        is_enough=lambda completion: True,
    )
    reasons = [
        each.answer.completion.finish_reason if isinstance(each.answer, Reply) else None for each in outcomes
    ]
    assert reasons[:3] == ["stop", "abort", "abort"]
    assert outcomes[3] == RequestOutcome(None, 0)  # it was not sent
    assert {name: fakes["a"].aborts[name] >= 2 for name in names[1:3]} == {"long+0": True, "long+1": True}
