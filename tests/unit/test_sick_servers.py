"""A server with a good /health and wrong responses: its requests move, and it is drained."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.counts import DROP_REASONS, DropReason, RolloutCounts, refuse_if_too_many_dropped
from megatron_dppo.rollout.rollouts import Rollouts
from megatron_dppo.rollout.scores import PromptScore
from megatron_dppo.rollout.scores import refuse_if_too_many_dropped as refuse_if_too_many
from megatron_dppo.types import Sample
from tests.support.sglang_stand_in import LOG_PROB, MODEL, TOKEN, StandIn, answer, serving

NUM_REQUESTS, NUM_TOKENS, MOST_AT_ONCE = 40, 6, 4


def _with_log_prob(content: dict[str, Any], value: Any) -> dict[str, Any]:
    content["meta_info"]["output_token_logprobs"][2][0] = value
    return content


def _without(content: dict[str, Any], key: str) -> dict[str, Any]:
    del content["meta_info"][key]
    return content


SICK: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {
    "status 500": lambda body: (500, {"error": {"message": "CUDA error"}}),
    "status 400": lambda body: (400, {"error": {"message": "refused"}}),
    "a page": lambda body: (200, "<html>a portal</html>"),
    "a list": lambda body: (200, []),
    "another id": lambda body: (200, answer(body | {"rid": "another"})),
    "no log-probs": lambda body: (200, _without(answer(body), "output_token_logprobs")),
    "null log-prob": lambda body: (200, _with_log_prob(answer(body), None)),
    "infinite log-prob": lambda body: (200, _with_log_prob(answer(body), float("-inf"))),
    "NaN log-prob": lambda body: (200, _with_log_prob(answer(body), float("nan"))),
    "positive log-prob": lambda body: (200, _with_log_prob(answer(body), 0.5)),
    "too many tokens": lambda body: (200, answer(body, num_tokens=NUM_TOKENS + 1)),
}


@dataclass
class Server(StandIn):
    """Answers /generate as `sick` does, and everything else as a sound server."""

    sick: Callable[[dict[str, Any]], tuple[int, Any]] | None = None

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        sound = super().respond(path, body, is_gone)
        return self.sick(body) if path == "/generate" and self.sick is not None else sound


@contextmanager
def engine_of(*servers: Server) -> Iterator[SglangEngine]:
    with serving(*servers) as urls:
        yield SglangEngine(urls, MODEL, Patience(first_pause_s=0.01), max_concurrent_requests=MOST_AT_ONCE)


def ask(engine: SglangEngine, number: int = NUM_REQUESTS) -> list[Sample]:
    requests = [Request(f"g{n}+0", (1, 2, 3), (1, 0, n)) for n in range(number)]
    return engine.generate(requests, SamplingParams(NUM_TOKENS))


def require_sound(found: list[Sample]) -> None:
    assert [each.request_id for each in found] == [f"g{n}+0" for n in range(len(found))]
    for each in found:
        assert (
            each.tokens.tolist() == [TOKEN] * NUM_TOKENS and each.log_probs.tolist() == [LOG_PROB] * NUM_TOKENS
        )


@pytest.mark.parametrize("kind", SICK)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_response_is_lost_to_one_sick_server_of_three(
    kind: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [Server() for _ in range(3)]
    servers[place].sick = SICK[kind]
    with engine_of(*servers) as engine, caplog.at_level(logging.WARNING):
        found = ask(engine)
        require_sound(found)
        refused = dict(engine.refusals)
        assert set(refused) == {servers[place].url} and 2 <= refused[servers[place].url] <= 2 * MOST_AT_ONCE
        num_moves = sum(each.num_moves for each in found)  # of those that it was working on, too
        assert num_moves == engine.counts.num_requeued >= refused[servers[place].url]
        assert f"{servers[place].url}: found" in caplog.text
        assert "refused while another server's are not" in caplog.text
        assert len(servers[place].num_asked) <= 2 * MOST_AT_ONCE
        servers[place].num_asked.clear()
        require_sound(ask(engine))  # another session: it is drained from its first faults on
        assert len(servers[place].num_asked) <= 2 * MOST_AT_ONCE


@pytest.mark.parametrize("kind", ["another id", "null log-prob", "NaN log-prob"])
def test_requests_are_dropped_after_a_try_at_each_sick_server(kind: str) -> None:
    """Each request was tried at both, and then dropped for its fault."""
    servers = [Server(sick=SICK[kind]), Server(sick=SICK[kind])]
    with engine_of(*servers) as engine:
        found = ask(engine, 12)
        assert dict(engine.refusals) == {server.url: 12 for server in servers}
    for each in found:
        is_dropped = each.finish_reason == "abort" or not bool(each.log_probs.isfinite().all())
        assert is_dropped and each.num_moves == 1


def test_error_names_an_address_if_all_servers_fail() -> None:
    servers = [Server(sick=SICK["status 500"]), Server(sick=SICK["status 500"])]
    with (
        engine_of(*servers) as engine,
        pytest.raises(ServerError, match=r"http://[^ ]*/generate: found status"),
    ):
        ask(engine, 12)


def test_a_request_that_no_server_takes_costs_itself_alone() -> None:
    """It is refused by both, and both go on with the others."""

    def refuse_one(body: dict[str, Any]) -> tuple[int, Any]:
        is_odd = body["rid"].startswith("g7+0")
        return (400, {"error": {"message": "refused"}}) if is_odd else (200, answer(body))

    servers = [Server(sick=refuse_one), Server(sick=refuse_one)]
    with engine_of(*servers) as engine:
        found = ask(engine)
        assert found[7].finish_reason == "abort"
        require_sound(found[:7])
        assert dict(engine.refusals) == {server.url: 1 for server in servers}
        asked = [sum(server.num_asked.values()) for server in servers]
        assert min(asked) > NUM_REQUESTS // 4


def test_an_evaluation_that_servers_end_names_them_with_its_own_refusals(tmp_path: Path) -> None:
    """The refusals of rollouts before it are not counted."""
    engine = SimpleNamespace(refusals={"http://a": 7, "http://b": 1})

    def run(each: SimpleNamespace, rollout: int, responses: Path) -> list[PromptScore]:
        engine.refusals = engine.refusals | {"http://a": 7 + 5, "http://c": 2}
        faults: dict[DropReason, int] = {"non_finite_log_probs": 3, "aborted": 2, "reward_failed": 1}
        return [PromptScore(0, 8, 8, 6, 0, 0, 9, 0.0, num_faults=faults, example="0+1: NaN")]

    rollouts: Any = object.__new__(Rollouts)
    rollouts._engine, rollouts._evaluation = engine, SimpleNamespace(sets=[SimpleNamespace(name="x")], run=run)
    scores, refusals = rollouts.evaluate(3, tmp_path)
    assert refusals == {"http://a": 5, "http://c": 2}
    with pytest.raises(ServerError, match=r"found 6 of 8 .*0\+1: NaN\. Refused .* http://a 5, http://c 2\."):
        refuse_if_too_many("x", scores["x"], 4 / 8, refusals)
    with pytest.raises(RolloutError, match=r"Fix the cause, set data\.reward_retries") as raised:
        refuse_if_too_many("x", scores["x"], 5 / 8, refusals)
    assert not isinstance(raised.value, ServerError), "5 by servers, and one by the reward is too many"
    refuse_if_too_many("x", scores["x"], 6 / 8, refusals)


def test_a_run_that_servers_end_names_them_with_their_refusals() -> None:
    dropped: dict[DropReason, int] = dict.fromkeys(DROP_REASONS, 0)
    counts = RolloutCounts(
        *(5, 0, 20, *[0] * 12),
        num_dropped={**dropped, "aborted": 9},
        example="a fault",
        refusals={"http://b": 4, "http://a": 12},
    )
    with pytest.raises(ServerError, match=r"a fault\. Refused .* by server: http://a 12, http://b 4\."):
        refuse_if_too_many_dropped(counts, 0.25)
    refuse_if_too_many_dropped(replace(counts, num_dropped={**dropped, "aborted": 5}), 0.25)
    by_rewards = replace(counts, num_dropped={**dropped, "aborted": 1, "reward_failed": 9})
    with pytest.raises(RolloutError) as raised:
        refuse_if_too_many_dropped(by_rewards, 0.25)
    assert not isinstance(raised.value, ServerError)
