"""The client against a small HTTP server that misbehaves on purpose, and counts what reaches it."""

import asyncio
import base64
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_dppo.engines.sglang.client import Call, Patience, SglangClient
from megatron_dppo.engines.sglang.protocol import most_bytes
from megatron_dppo.errors import ServerError
from tests.support.loop_time import skip

CALM = Patience(
    connect_timeout_s=60.0, control_timeout_s=60.0, generate_timeout_s=60.0, max_attempts=3, first_pause_s=0.01
)
Step = tuple[int, bytes] | str  # status and body, or what goes wrong
GOOD: Step = (200, b'{"output_ids": []}')


class Misbehaving:
    """Answers /generate with one step of `script` after another, the last of them again and again."""

    def __init__(self, script: list[Step]) -> None:
        self.script, self.calls, self.keys, self.rids = script, [], [], []
        self.is_over = threading.Event()
        self.num_trickled = self.num_flooded = 0
        self.url = ""

    @property
    def num_generations(self) -> int:
        return sum(path == "/generate" for path in self.calls)


@contextmanager
def _serve(script: list[Step]) -> Iterator[Misbehaving]:
    behaviour = Misbehaving(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            behaviour.rids.append(body.get("rid"))
            behaviour.calls.append(self.path)
            behaviour.keys.append(self.headers.get("Authorization"))
            if self.path == "/abort_request":
                return self._answer(200, b"")
            step = behaviour.script[min(behaviour.num_generations, len(behaviour.script)) - 1]
            if isinstance(step, tuple):
                return self._answer(*step)
            if step == "slow":
                behaviour.is_over.wait()
            if step == "cut":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b'{"output_ids"')
            if step == "flood":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while True:  # until the client goes away
                    self.wfile.write(b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16)))
                    behaviour.num_flooded += 1 << 16
            if step == "trickle":
                self.send_response(200)
                self.send_header("Content-Length", "1000000000")
                self.end_headers()
                while not behaviour.is_over.wait(0.02):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    behaviour.num_trickled += 1
            self.close_connection = True
            return None

        do_GET = do_POST

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                return  # the client went away, as it may

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        request_queue_size = 1024  # or the kernel drops connections that come together

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    behaviour.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield behaviour
    finally:
        behaviour.is_over.set()
        server.shutdown()
        server.server_close()


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


@pytest.mark.parametrize("status", [429, 503])
def test_what_was_not_begun_is_asked_again(status: int) -> None:
    with _serve([(status, b"busy"), GOOD]) as server:
        client, answer = _with_client(server.url, _generate)
    assert answer == GOOD[1]
    assert server.calls == ["/generate"] * 2
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (1, 0)


@pytest.mark.parametrize(
    "step", [(500, b"x"), (502, b""), "close", "cut", (200, b'{"output_ids'), (200, b"<html>"), (200, b"")]
)
def test_what_may_have_been_sampled_is_aborted_and_counted(step: Step) -> None:
    with _serve([step, GOOD]) as server:
        client, answer = _with_client(server.url, _generate)
    assert answer == GOOD[1]
    assert server.calls == ["/generate", "/abort_request", "/generate"]
    first, aborted, second = server.rids
    assert first == aborted == "g+0#1" and second.startswith("g+0#") and second != first
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (1, 1)


def test_attempts_are_bounded() -> None:
    with _serve([(500, b'{"error": {"message": "out of luck"}}')]) as server:
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


def test_a_response_that_does_not_come_is_aborted_and_never_asked_again() -> None:
    with _serve(["slow", GOOD]) as server:

        async def generate(client: SglangClient) -> object:
            generating = asyncio.create_task(_generate(client))
            await _until(lambda: server.num_generations == 1)
            skip(CALM.generate_timeout_s)
            return await asyncio.wait_for(generating, 30)

        _require_given_up(server, *_with_client(server.url, generate))


def test_a_response_that_never_ends_is_aborted_and_never_asked_again() -> None:
    """Each byte comes in time, and the whole response in no time."""
    with _serve(["trickle", GOOD]) as server:

        async def generate(client: SglangClient) -> object:
            generating = asyncio.create_task(_generate(client))
            for _ in range(6):
                before = server.num_trickled
                await _until(lambda: generating.done() or server.num_trickled > before + 2)  # noqa: B023
                skip(CALM.generate_timeout_s / 2)
            return await asyncio.wait_for(generating, 30)

        _require_given_up(server, *_with_client(server.url, generate))


def _require_given_up(server: Misbehaving, client: SglangClient, error: object) -> None:
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
    with _serve(["flood", GOOD]) as server:
        _, answer = _with_client(server.url, lambda client: client.generate(body))
        assert answer == GOOD[1]
        assert server.calls == ["/generate", "/abort_request", "/generate"]
        assert most < server.num_flooded < most + (1 << 24)  # what the sockets hold
    with _serve(["flood"]) as server:
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
    with _serve([(status, b"no"), GOOD]) as server:
        client, error = _with_client(server.url, _generate)
    assert f"status {status} (no)" in str(error)
    assert server.calls == ["/generate"]
    assert client.counts.num_retries == 0


def test_where_nothing_listens() -> None:
    with _serve([GOOD]) as server:
        url = server.url
    client, error = _with_client(url, _generate)
    assert "no connection" in str(error)
    assert (client.counts.num_retries, client.counts.num_maybe_sampled_twice) == (2, 0)
    assert _with_client(url, SglangClient.is_healthy)[1] is False


def test_the_key_is_sent() -> None:
    with _serve([GOOD]) as server:
        _with_client(server.url, _generate, api_key="secret")
        _with_client(server.url, _generate)
    assert server.keys == ["Bearer secret", None]


def test_another_kind_of_server_is_refused() -> None:
    with _serve([(200, b"<html>")]) as server:
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
def test_a_call_of_a_push_that_fails_is_an_error_whatever_its_status(step: Step, is_done: bool) -> None:
    with _serve([step]) as server:

        async def push() -> object:
            async with SglangClient(server.url, CALM) as client:
                return await client.command(Call("/update_weights_from_disk", {}), timeout_s=60.0)

        if is_done:
            asyncio.run(push())
        else:
            with pytest.raises(ServerError, match=r"found .*; expected success"):
                asyncio.run(push())
        assert server.calls == ["/update_weights_from_disk"], "it is not repeated"
