"""Sessions on servers that fail, hang or change: every `ask` returns, and nothing stays at a server."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    RolloutEngine,
    SamplingParams,
    Session,
    give_up,
    response_alone,
)
from megatron_dppo.engines.sglang import session as sessions
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.errors import RolloutError, ServerError, WeightSyncError
from megatron_dppo.types import Sample, WeightVersionSpan
from tests.support.collecting import sample_until
from tests.support.loop_time import skip
from tests.support.sglang_stand_in import LOG_PROB, MODEL, TOKEN, StandIn, answer, serving

PARAMS = SamplingParams(10)
HOLD_S = 60.0  # for which a hold waits for the next response; tests that let it pass set the clock forward
PATIENCE = Patience(connect_timeout_s=60, control_timeout_s=HOLD_S, max_attempts=4, first_pause_s=0.01)
NUM_NEW = 2  # tokens of a request that is aborted
LIMIT_S = 600  # nothing takes so long, unless it hangs
PARTIAL = response_alone(
    "", torch.full((3,), TOKEN), torch.full((3,), LOG_PROB), "abort", None, None, (WeightVersionSpan(0, 3, -1),)
)


@dataclass
class Server(StandIn):
    """Replies to "long" requests after their abort, and to the others at once."""

    version: str = "0"
    is_deaf: bool = False  # it replies to no abort, and to no request
    is_early: bool = False  # the first abort of each request comes before the request
    dies_of: str = "no request"  # beginning of the ids of requests that end it
    aborts: Counter[str] = field(default_factory=Counter[str])
    rids: list[str] = field(default_factory=list[str])  # with the session's suffix
    is_lost_at_abort: bool = False
    is_lost: bool = False
    breaks: str = ""  # the request whose connection is closed at its abort
    turns: threading.Semaphore | None = None  # one for each reply to an aborted request
    unanswered: dict[str, threading.Event] = field(default_factory=dict[str, threading.Event])
    is_over: threading.Event = field(default_factory=threading.Event)

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        rid = body.get("rid", "")
        self.is_lost |= self.is_lost_at_abort and path == "/abort_request"
        self.is_lost |= path == "/generate" and rid.startswith(self.dies_of)
        if self.is_lost:
            for event in list(self.unanswered.values()):
                event.set()
            return 0, None
        if self.is_deaf and path == "/abort_request":
            self.is_over.wait(LIMIT_S)
        if path == "/abort_request" and rid in self.unanswered:
            self.aborts[rid] += 1
            if self.aborts[rid] > self.is_early:
                self.unanswered[rid].set()
        if path == "/generate":
            self.rids.append(rid)
        if path != "/generate" or not rid.startswith("long"):
            status, content = super().respond(path, body, is_gone)
            return status, self._by_version(content) if path == "/generate" else content
        self.num_asked[rid] += 1
        self.unanswered[rid] = is_aborted = threading.Event()
        (self.is_over if self.is_deaf else is_aborted).wait(LIMIT_S)
        self.unanswered.pop(rid, None)
        if rid.partition("#")[0] == self.breaks:
            return 0, None
        if self.turns is not None:
            self.turns.acquire(timeout=LIMIT_S)
        return (0, None) if self.is_lost else (200, self._by_version(answer(body, num_tokens=NUM_NEW)))

    def _by_version(self, content: Any) -> Any:
        content["meta_info"]["weight_versions"][0]["version"] = self.version
        return content


@contextmanager
def _running(*servers: Server) -> Iterator[list[str]]:
    with serving(*servers) as urls, ExitStack() as stack:
        for server in servers:
            stack.callback(server.is_over.set)
        yield urls


def _in_session(engine: RolloutEngine, work: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(LIMIT_S), engine.session() as session:
            await work(session)

    asyncio.run(run())


def _run(
    work: Callable[[Any], Awaitable[None]], *servers: Server, patience: Patience = PATIENCE, **options: Any
) -> SglangEngine:
    """Run `work` in a session of an engine on these servers, and return the engine."""
    with _running(*servers) as urls:
        engine = SglangEngine(urls, MODEL, patience, **options)
        _in_session(engine, work)
    return engine


def _requests(name: str, count: int, partial: Sample | None = None) -> list[Request]:
    requests = [Request(f"{name}{k}+0", (1, 2), (0, 0, k)) for k in range(count)]
    return [replace(each, partial=partial and replace(partial, id=each.id)) for each in requests]


def _ask(session: Session, requests: Sequence[Request]) -> list[asyncio.Task[Sample]]:
    return [asyncio.create_task(session.ask(request, PARAMS)) for request in requests]


async def _arrived(count: int, *servers: Server) -> None:
    while sum(len(server.unanswered) for server in servers) < count:
        await asyncio.sleep(0.01)


async def _done(count: int, asked: Sequence[asyncio.Task[Sample]]) -> None:
    while sum(task.done() for task in asked) < count:
        await asyncio.sleep(0.01)


def _sizes(completions: Sequence[Sample]) -> list[int]:
    return [each.tokens.numel() for each in completions]


def test_late_requests_are_sampled_and_counted_at_the_end_of_the_session() -> None:
    with _running(server := Server()) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE)

        async def work(session: Session) -> None:
            for name in ("early", "late"):
                completions = await asyncio.gather(*_ask(session, _requests(name, 3)))
                assert [each.finish_reason for each in completions] == ["length"] * 3
                await asyncio.sleep(0)
            assert not session.is_held and engine.counts == EngineCounts()

        _in_session(engine, work)
        assert engine.counts == EngineCounts(num_prompt_tokens=6 * 2, num_cached_tokens=6)
        assert server.num_asked.total() == 6


@pytest.mark.parametrize("room", [2, 4, 8])
@pytest.mark.parametrize("partial", [None, PARTIAL], ids=["fresh", "resumed"])
def test_a_hold_returns_partial_responses_and_leaves_none_at_the_server(
    partial: Sample | None, room: int
) -> None:
    with _running(server := Server()) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE, max_concurrent_requests=room)

        async def work(session: Session) -> None:
            num_sent, num_old = min(room, 6), partial.tokens.numel() if partial else 0
            asked = _ask(session, _requests("long", 6, partial))
            await _arrived(num_sent, server)
            await asyncio.gather(session.hold(), session.hold())
            assert session.is_held and not server.unanswered
            completions = await asyncio.gather(*asked)
            assert {each.finish_reason for each in completions} == {"abort"}
            assert _sizes(completions) == [num_old + NUM_NEW] * num_sent + [num_old] * (6 - num_sent)
            assert server.num_asked.total() == num_sent  # those without room were not sent
            late = _requests("late", 2, partial)
            completions = await asyncio.gather(*_ask(session, late))
            assert _sizes(completions) == _sizes([give_up(request) for request in late]) == [num_old] * 2
            await session.hold()
            assert server.num_asked.total() == num_sent and not session.errors

        _in_session(engine, work)
        assert engine.counts.num_unanswered == engine.counts.num_requeued == 0


@pytest.mark.parametrize("fault", ["is_deaf", "is_lost_at_abort"])
def test_a_hold_returns_the_tokens_of_a_sound_server_while_another_fails(fault: str) -> None:
    sound, bad = Server(), Server()
    with _running(sound, bad) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE)

        async def work(session: Session) -> None:
            asked = _ask(session, _requests("long", 8, PARTIAL))
            await _arrived(8, sound, bad)
            at_bad = {rid.partition("#")[0] for rid in bad.unanswered}
            setattr(bad, fault, True)
            holding = asyncio.create_task(session.hold())
            await asyncio.gather(*(task for k, task in enumerate(asked) if f"long{k}+0" not in at_bad))
            assert not sound.unanswered
            if fault == "is_deaf":
                skip(HOLD_S)
            await holding
            for completion in await asyncio.gather(*asked):
                num_new = 0 if completion.request_id in at_bad else NUM_NEW
                assert (completion.finish_reason, completion.tokens.numel()) == ("abort", 3 + num_new)
                assert completion.weight_versions[0] == WeightVersionSpan(0, 3, -1)
            assert len(at_bad) == 4 and not session.errors

        _in_session(engine, work)
        assert (engine.counts.num_unanswered, engine.counts.num_requeued) == (0, 0)


def test_a_connection_that_breaks_in_a_hold_costs_one_request() -> None:
    turns = threading.Semaphore(0)
    server = Server(breaks="long1+0", turns=turns)

    async def work(session: Session) -> None:
        asked = _ask(session, _requests("long", 3, PARTIAL))
        await _arrived(3, server)
        holding = asyncio.create_task(session.hold())
        await asked[1]
        turns.release(2)
        await holding
        assert _sizes(await asyncio.gather(*asked)) == [3 + NUM_NEW, 3, 3 + NUM_NEW]
        assert not session.errors

    _run(work, server, patience=replace(PATIENCE, max_attempts=1))


def test_a_hold_waits_while_responses_arrive() -> None:
    turns = threading.Semaphore(0)
    server = Server(turns=turns)

    async def work(session: Session) -> None:
        asked = _ask(session, _requests("long", 4))
        await _arrived(4, server)
        holding = asyncio.create_task(session.hold())
        for num_answered in range(4):
            await _done(num_answered, asked)
            skip(HOLD_S / 2)
            turns.release()
        await holding
        assert _sizes(await asyncio.gather(*asked)) == [NUM_NEW] * 4

    _run(work, server)


def test_a_hold_whose_only_server_is_lost_returns_the_earlier_tokens() -> None:
    server = Server(is_lost_at_abort=True)

    async def work(session: Session) -> None:
        asked = _ask(session, _requests("long", 4, PARTIAL))
        await _arrived(4, server)
        await session.hold()
        assert _sizes(await asyncio.gather(*asked)) == [3] * 4 and not session.errors

    _run(work, server)


def test_only_a_request_that_failed_has_an_error_after_a_hold() -> None:
    bad = "long0+0", "given up+0"
    server = Server(fails_first=lambda rid: rid in bad)
    with _running(server) as urls:

        async def work(session: Session) -> None:
            asked = _ask(session, _requests("long", 2))
            given_up = await session.ask(Request("given up+0", (1, 2), (0, 0, 0)), PARAMS)
            await _arrived(2, server)
            await session.hold()
            held = await asyncio.gather(*asked)
            assert {each.finish_reason for each in [given_up, *held]} == {"abort"}
            assert session.errors.keys() == {"given up+0"} and type(session.errors["given up+0"]) is ServerError

        engine = SglangEngine(urls, MODEL, replace(PATIENCE, max_attempts=1))
        _in_session(engine, work)
        assert engine.counts.num_unanswered == 1


@dataclass
class Torn(Server):
    """Breaks the connection of each request's first attempt, and still has its id, as a real server may."""

    torn: dict[str, str] = field(default_factory=dict[str, str])

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        if path == "/generate":
            name, _, _ = body["rid"].partition("#")
            if name not in self.torn:
                self.torn[name] = body["rid"]
                return 0, None
            if self.torn[name] == body["rid"]:
                return 400, {"error": {"message": f"Duplicate request ID detected: {body['rid']}"}}
        return super().respond(path, body, is_gone)


def test_a_hold_aborts_a_retry_by_its_new_id() -> None:
    with _running(server := Torn()) as urls:

        async def work(session: Session) -> None:
            asked = _ask(session, [*_requests("long", 2), *_requests("quick", 1)])
            await _arrived(2, server)
            await session.hold()
            assert _sizes(await asyncio.gather(*asked)) == [NUM_NEW, NUM_NEW, 10]
            assert not session.errors

        engine = SglangEngine(urls, MODEL, PATIENCE)
        _in_session(engine, work)
        assert engine.counts.num_retries == engine.counts.num_maybe_sampled_twice == 3


def test_sessions_of_several_threads_share_an_engine() -> None:
    with _running(server := Server()) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE)
        is_open, may_hold = threading.Event(), threading.Event()

        async def work(session: Session) -> None:
            asked = _ask(session, _requests("long", 4))
            await _arrived(4, server)
            is_open.set()
            while not may_hold.is_set():
                await asyncio.sleep(0.01)
            await session.hold()
            assert _sizes(await asyncio.gather(*asked)) == [NUM_NEW] * 4

        with ThreadPoolExecutor(4) as threads:
            producer = threads.submit(_in_session, engine, work)
            assert is_open.wait(LIMIT_S)
            names = [f"quick{thread}/" for thread in range(3)]
            found = list(threads.map(lambda name: engine.generate(_requests(name, 5), PARAMS), names))
            assert [_sizes(completions) for completions in found] == [[10] * 5] * 3
            assert engine.counts == EngineCounts(num_prompt_tokens=15 * 2, num_cached_tokens=15)
            assert len(server.unanswered) == 4  # what one session ends, another keeps
            may_hold.set()
            producer.result(LIMIT_S)
        assert engine.counts == EngineCounts(num_prompt_tokens=19 * 2, num_cached_tokens=19)


def test_a_response_by_other_weights_drains_the_server_for_the_session() -> None:
    kept, changed = Server(), Server()
    with _running(kept, changed) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE)

        async def work(session: Session) -> None:
            await asyncio.gather(*_ask(session, _requests("before", 4)))
            changed.version = "1"
            first = await asyncio.gather(*_ask(session, _requests("first", 8)))
            num_asked = changed.num_asked.total()
            then = await asyncio.gather(*_ask(session, _requests("then", 8)))
            spans = {span.version for each in [*first, *then] for span in each.weight_versions}
            assert spans == {0} and _sizes([*first, *then]) == [10] * 16
            assert changed.num_asked.total() == num_asked > 0
            assert sum(each.num_moves for each in first) > 0 == sum(each.num_moves for each in then)

        _in_session(engine, work)
        assert engine.counts.num_requeued > 0 == engine.counts.num_unanswered


def test_a_server_gets_each_id_once() -> None:
    """SGLang cleans up after a reply by its id, and would abort the next turn if it had the same."""
    server = Server()

    async def work(session: Session) -> None:
        for _ in range(3):
            completion = await session.ask(Request("talk+0", (1, 2), (0, 0, 0)), PARAMS)
            assert completion.request_id == "talk+0"

    with _running(server) as urls:
        for _ in range(2):
            _in_session(SglangEngine(urls, MODEL, PATIENCE), work)
    assert len(set(server.rids)) == 6
    assert not any(b.startswith(a) for a in server.rids for b in server.rids if a != b)


def test_a_request_that_ends_servers_leaves_one_of_four() -> None:
    servers = [Server(dies_of="poison") for _ in range(4)]

    async def work(session: Session) -> None:
        asked = _ask(session, [*_requests("poison", 1), *_requests("quick", 20)])
        completions = await asyncio.gather(*asked)
        assert (completions[0].finish_reason, _sizes(completions)) == ("abort", [0] + [10] * 20)
        assert session.errors.keys() == {"poison0+0"} and type(session.errors["poison0+0"]) is ServerError
        moves.append(sum(each.num_moves for each in completions))

    moves = list[int]()
    engine = _run(work, *servers, max_concurrent_requests=1)
    assert engine.counts.num_requeued == sum(moves) >= 2 and engine.counts.num_unanswered == 1
    assert sum(server.is_lost for server in servers) == 3


def test_an_abort_that_came_too_early_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_ABORT_AGAIN_S", 0.01)
    server = Server(is_early=True)

    async def work(session: Session) -> None:
        asked = _ask(session, _requests("long", 3))
        await _arrived(2, server)
        await session.hold()
        assert _sizes(await asyncio.gather(*asked)) == [NUM_NEW, NUM_NEW, 0]  # the last was not sent
        assert not session.errors

    engine = _run(work, server, max_concurrent_requests=2)
    assert len(server.aborts) == 2 and min(server.aborts.values()) >= 2
    assert engine.counts.num_prompt_tokens == 2 * 2


def test_without_servers_every_ask_raises() -> None:
    servers = Server(), Server()
    with _running(*servers) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE, max_concurrent_requests=2)

        async def work(session: Session) -> None:
            asked = _ask(session, _requests("long", 9))
            await _arrived(4, *servers)  # the others wait for room
            for server in servers:
                server.is_lost = True
                for event in list(server.unanswered.values()):
                    event.set()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(each) for each in found] == [ServerError] * 9
            with pytest.raises(ServerError, match="200 within 4 "):
                await session.ask(Request("late+0", (1, 2), (0, 0, 0)), PARAMS)
            await session.hold()
            assert (await session.ask(Request("late+0", (1, 2), (0, 0, 0)), PARAMS)).finish_reason == "abort"

        _in_session(engine, work)


def test_a_cancelled_request_leaves_room_for_others() -> None:
    server = Server()

    async def work(session: Session) -> None:
        long, waiting, quick = _requests("long", 2) + _requests("quick", 1)
        tasks = _ask(session, [long, waiting, quick])
        await _arrived(1, server)
        for task in tasks[:2]:
            task.cancel()
        assert (await tasks[2]).finish_reason == "length"
        assert all(task.cancelled() for task in tasks[:2]) and waiting.id not in server.num_asked
        assert (
            await session.ask(replace(quick, id=waiting.id.replace("long", "again")), PARAMS)
        ).tokens.numel()

    _run(work, server, max_concurrent_requests=1)


def test_the_end_of_a_session_ends_the_requests_in_flight() -> None:
    with _running(server := Server()) as urls:
        asked: list[asyncio.Task[Sample]] = []

        async def work(session: Session) -> None:
            asked.extend(_ask(session, _requests("long", 3, PARTIAL)))
            await _arrived(2, server)

        async def run() -> list[Sample]:
            async with asyncio.timeout(LIMIT_S):
                async with SglangEngine.session(engine) as session:
                    await work(session)
                return await asyncio.gather(*asked)

        engine = SglangEngine(urls, MODEL, PATIENCE, max_concurrent_requests=2)
        assert _sizes(asyncio.run(run())) == [3] * 3


OTHER = Request("other+0", (1, 2), (0, 0, 0))


@pytest.mark.parametrize(
    ("request_", "params", "message"),
    [
        (replace(OTHER, id="long0+0"), PARAMS, "found a pending request with this id"),
        (replace(OTHER, prompt_tokens=(5, 64)), PARAMS, "found token ids 5 to 64; expected 0 to 63"),
        (replace(OTHER, prompt_tokens=(5, -1)), PARAMS, "found token ids -1 to 5"),
        (replace(OTHER, prompt_tokens=()), PARAMS, "found 0 prompt tokens"),
        (replace(OTHER, prompt_tokens=(1,) * 506), SamplingParams(4), "found 506 prompt tokens"),
        (OTHER, SamplingParams(508), "at most 506 tokens together"),
        (OTHER, SamplingParams(0), "max_response_tokens >= 1"),
        (OTHER, SamplingParams(8, num_topk_log_probs=65), "expected 0 to the vocabulary of 64"),
        (OTHER, SamplingParams(8, top_p=0.9, num_topk_log_probs=2), "top_p = 1"),
    ],
)
def test_a_refused_request_ends_no_others(request_: Request, params: SamplingParams, message: str) -> None:
    server = Server()

    async def work(session: Session) -> None:
        asked = _ask(session, _requests("long", 1))
        await _arrived(1, server)
        with pytest.raises(RolloutError, match=message):
            await session.ask(request_, params)
        await session.hold()
        assert _sizes([await asked[0]]) == [NUM_NEW]

    _run(work, server)


def test_calls_that_send_nothing() -> None:
    with _running(server := Server()) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE)
        assert engine.generate([], PARAMS) == []
        with pytest.raises(RolloutError, match="two requests other"):
            engine.generate([OTHER, OTHER], PARAMS)
        with pytest.raises(RolloutError, match="at most 510 tokens together"):  # never held
            engine.generate([OTHER], SamplingParams(509))
        with pytest.raises(WeightSyncError, match="weight_sync"):
            engine.load_weights([], 1)
    assert not server.rids


def test_sampling_until_enough_holds_the_session() -> None:
    with _running(server := Server()) as urls:
        engine = SglangEngine(urls, MODEL, PATIENCE, max_concurrent_requests=3)
        requests = [*_requests("long", 2), *_requests("quick", 2), *_requests("long never", 1)]
        told = list[str]()

        def is_enough(completion: Sample) -> bool:
            told.append(completion.request_id)
            return len(told) == 2

        completions = sample_until(engine, requests, PARAMS, is_enough)
        assert _sizes(completions) == [NUM_NEW, NUM_NEW, 10, 10, 0]
        assert told == ["quick0+0", "quick1+0"] and not server.unanswered
        assert server.num_asked.total() == 4
