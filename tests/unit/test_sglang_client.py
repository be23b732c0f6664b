"""The client against a small HTTP server that misbehaves and counts its calls."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_dppo.engines.sglang.client import Call, Patience, SglangClient
from megatron_dppo.engines.sglang.protocol import most_bytes
from megatron_dppo.errors import ServerError
from tests.support.loop_time import skip
from tests.support.sglang_stand_in import StandIn

CALM = Patience(
    connect_timeout_s=60.0, control_timeout_s=60.0, generate_timeout_s=60.0, max_attempts=3, first_pause_s=0.01
)
Step = tuple[int, bytes] | str  # status and body, or what goes wrong
GOOD: Step = (200, b'{"output_ids": []}')


@dataclass
class Misbehaving(StandIn):
    """Replies to /generate with one step of `script` after another, and repeats the last of them."""

    script: Sequence[Step] = (GOOD,)
    calls: list[str] = field(default_factory=list[str])
    rids: list[str] = field(default_factory=list[str])
    num_trickled: int = 0
    num_flooded: int = 0

    @property
    def num_generations(self) -> int:
        return self.calls.count("/generate")

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        self.rids.append(body.get("rid", ""))
        self.calls.append(path)
        if path == "/abort_request":
            return 200, b""
        match self.script[min(self.num_generations, len(self.script)) - 1]:
            case "slow":
                while not is_gone():
                    time.sleep(0.02)
                return 0, None
            case "cut":
                return 200, iter([b'{"output_ids"'])
            case "flood":
                return 200, self._flood()
            case "trickle":
                return 200, self._trickle(is_gone)
            case str():
                return 0, None
            case status, content:
                return status, content

    def _flood(self) -> Iterator[bytes]:
        while True:  # until the client goes away
            yield b" " * (1 << 16)
            self.num_flooded += 1 << 16

    def _trickle(self, is_gone: Callable[[], bool]) -> Iterator[bytes]:
        while not is_gone():
            yield b" "
            self.num_trickled += 1
            time.sleep(0.02)


def _with_client(
    url: str,
    use: Callable[[SglangClient], Coroutine[Any, Any, Any]],
    api_key: str | None = None,
) -> tuple[SglangClient, Any]:
    async def run() -> tuple[SglangClient, Any]:
        async with SglangClient(url, CALM, api_key=api_key) as client:
            try:
                return client, await use(client)
            except ServerError as error:
                return client, error

    return asyncio.run(run())


def _generate(client: SglangClient) -> Coroutine[Any, Any, object]:
    return client.generate({"rid": "g+0#1"})


NOT_BEGUN: list[Step] = [(429, b"busy"), (503, b"busy")]
BEGUN: list[Step] = [
    (500, b"x"),
    (502, b""),
    "close",
    "cut",
    (200, b'{"output_ids'),
    (200, b"<html>"),
    (200, b""),
]


@pytest.mark.parametrize("step", NOT_BEGUN + BEGUN)
def test_a_failed_attempt_is_repeated_and_aborted_if_it_may_have_sampled(step: Step) -> None:
    with Misbehaving(script=[step, GOOD]).running() as server:
        client, content = _with_client(server.url, _generate)
    has_begun = step in BEGUN
    assert content == GOOD[1]
    assert server.calls == ["/generate", *["/abort_request"] * has_begun, "/generate"]
    first, *_, second = server.rids
    assert server.rids[:-1] == ["g+0#1"] * (1 + has_begun) and second.startswith("g+0#")
    assert (second != first) or not has_begun
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (1, int(has_begun))


def test_attempts_are_bounded() -> None:
    with Misbehaving(script=[(500, b'{"error": {"message": "out of luck"}}')]).running() as server:
        client, error = _with_client(server.url, _generate)
    assert server.num_generations == CALM.max_attempts == len(set(server.rids))
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (2, 2)
    assert isinstance(error, ServerError)
    for part in ("POST", server.url, "status 500 (out of luck)", "within 3 attempts", "server's log"):
        assert part in str(error)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("step", ["slow", "trickle"])
def test_a_response_that_has_no_end_in_time_is_aborted_and_not_repeated(step: Step) -> None:
    """Each byte of the second one comes in time."""
    with Misbehaving(script=[step, GOOD]).running() as server:

        async def generate(client: SglangClient) -> object:
            generating = asyncio.create_task(_generate(client))
            await _until(lambda: server.num_generations == 1)
            for _ in range(6 if step == "trickle" else 2):
                before = server.num_trickled
                await _until(lambda: generating.done() or step == "slow" or server.num_trickled > before + 2)  # noqa: B023
                skip(CALM.generate_timeout_s / 2)
            return await asyncio.wait_for(generating, 30)

        client, error = _with_client(server.url, generate)
    assert isinstance(error, ServerError)
    assert "no response within 60 s" in str(error)
    assert server.calls == ["/generate", "/abort_request"]
    assert (client.counts.num_retries, client.counts.num_timed_out) == (0, 1)


@pytest.mark.parametrize("num_tokens", [0, 2000])
def test_a_response_without_end_takes_bounded_memory(num_tokens: int) -> None:
    """It counts as broken, like one that was cut: it is aborted and requested again."""
    sampling = {"max_new_tokens": num_tokens}
    body = {"rid": "g+0#1", "input_ids": [], "sampling_params": sampling, "return_routed_experts": True}
    most = most_bytes(body)
    assert most > 10_000 * num_tokens
    with Misbehaving(script=["flood", GOOD]).running() as server:
        _, content = _with_client(server.url, lambda client: client.generate(body))
        assert content == GOOD[1]
        assert server.calls == ["/generate", "/abort_request", "/generate"]
        assert most < server.num_flooded < most + (1 << 24)  # what the sockets hold
    with Misbehaving(script=["flood"]).running() as server:
        _, error = _with_client(server.url, lambda client: client.generate(body))
    assert f"more than the {most} bytes" in str(error)


def test_responses_of_servers_have_a_fraction_of_the_bytes_that_they_may_have() -> None:
    """Every number at its longest, and more of them than any model has: 94 layers, 22 experts each."""
    number = -0.12345678901234567e-100
    for topk, routes in ((0, False), (20, False), (0, True), (64, True)):
        body = {
            "input_ids": list(range(300)),
            "sampling_params": {"max_new_tokens": 700},
            "top_logprobs_num": topk,
            "return_routed_experts": routes,
        }
        entry = [number, 1234567, None]
        ids = base64.b64encode(bytes(4 * 94 * 22 * 1000)).decode()
        reply = {
            "text": "\U0001f642" * 700,
            "output_ids": [1234567] * 700,
            "meta_info": {
                "output_token_logprobs": [entry] * 700,
                "input_token_logprobs": [entry] * 300,
                "output_top_logprobs": [[entry] * topk] * 700,
                "weight_versions": [{"version": "1234567", "start": 1234567, "end": 1234567}] * 700,
                "routed_experts": ids if routes else None,
            },
        }
        assert len(json.dumps(reply)) < 0.8 * most_bytes(body)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final(status: int) -> None:
    with Misbehaving(script=[(status, b"no"), GOOD]).running() as server:
        client, error = _with_client(server.url, _generate)
    assert f"status {status} (no)" in str(error)
    assert (server.calls, client.counts.num_retries) == (["/generate"], 0)


def test_a_url_without_a_server_is_an_error() -> None:
    with Misbehaving().running() as server:
        url = server.url
    client, error = _with_client(url, _generate)
    assert "no connection" in str(error)
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (2, 0)
    assert _with_client(url, SglangClient.is_healthy)[1] is False


def test_the_key_is_sent() -> None:
    with Misbehaving().running() as server:
        _with_client(server.url, _generate, api_key="secret")
        _with_client(server.url, _generate)
    assert server.keys == ["Bearer secret", None]


def test_another_kind_of_server_is_refused() -> None:
    with Misbehaving(script=[(200, b"<html>")]).running() as server:
        _, error = _with_client(server.url, SglangClient.connect)
    assert "expected an SGLang server there" in str(error)


@pytest.mark.parametrize(
    ("step", "is_done"),
    [
        ((200, b'{"success": true}'), True),
        ((200, b""), True),  # some calls of SGLang have no body
        ((200, b'{"success": false, "message": "no such weights"}'), False),
        ((400, b'{"success": true}'), False),
    ],
)
def test_a_call_of_a_push_fails_by_its_body_or_its_status(step: Step, is_done: bool) -> None:
    call = Call("/update_weights_from_disk", {})
    with Misbehaving(script=[step]).running() as server:
        _, error = _with_client(server.url, lambda client: client.command(call, timeout_s=60.0))
    assert isinstance(error, ServerError) != is_done
    assert server.calls == [call.path], "it is not repeated"
