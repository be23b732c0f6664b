"""A fake SGLang server; tests script its replies, as a real one sends them under memory pressure.

`StandIn` responds at once; `LiveStandIn` takes time for each token, holds weights of a version, and can be
interrupted, updated, hung and killed.
"""

import base64
import json
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.types import ModelRouting

ROUTING = ModelRouting((0, 1, 2), 8, 2)
MODEL = ServedModel(vocab_size=64, num_layers=3, end_tokens=(0,), routing=ROUTING)
TOKEN, LOG_PROB = 3, -0.5
_PUSH = "/update_weights_from_disk"
_FACTS = json.loads(
    (Path(__file__).parents[1] / "unit" / "sglang_replies" / "0.5.23" / "facts.json").read_text()
)
_IDLE = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
_GETS = {"/server_info": _FACTS["server_info"], "/model_info": _FACTS["model_info"], "/health": None}


def routes_base64(places: np.ndarray[Any, Any], num_experts: int = 8) -> str:
    """The routed_experts of a reply: two neighbours of `num_experts` in each of three layers for each place."""
    first = places % (num_experts - 1)
    routes = np.stack([first, first + 1], axis=-1)[:, None].repeat(3, axis=1)
    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def reply(
    asked: Mapping[str, Any],
    tokens: list[int],
    versions: list[int],
    finish: str,
    log_probs: Sequence[float] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """The JSON that replies to a body of /generate with these tokens, each sampled by weights of a version."""
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    stops = [*starts[1:], len(tokens)]
    log_probs = [LOG_PROB] * len(tokens) if log_probs is None else log_probs
    known = {
        "id": asked["rid"],
        "finish_reason": {"type": finish},
        "prompt_tokens": len(asked["input_ids"]),
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_versions": [
            {"version": str(versions[start]), "start": start, "end": stop}
            for start, stop in zip(starts, stops, strict=bool(starts))
        ],
        "output_token_logprobs": [[mu, token, None] for mu, token in zip(log_probs, tokens, strict=True)],
    }
    return {"output_ids": tokens, "meta_info": known | meta}


def answer(
    asked: dict[str, Any], num_retractions: int = 0, num_tokens: int | None = None, changed_at: int = 0
) -> dict[str, Any]:
    """The JSON that replies to a body of /generate: `TOKEN` to the limit, or aborted after `num_tokens`.

    The server's weights changed after `changed_at` tokens, unless that is 0.
    """
    limit = asked["sampling_params"]["max_new_tokens"]
    count = limit if num_tokens is None else num_tokens
    finish = "length" if count == limit else "abort"
    versions = [int(0 < changed_at <= place) for place in range(count)]
    meta: dict[str, Any] = {"cached_tokens": 1, "num_retractions": num_retractions}
    if asked["return_routed_experts"]:
        places = np.arange(asked["routed_experts_start_len"], len(asked["input_ids"]) + count - 1)
        meta["routed_experts"] = routes_base64(places)
    return reply(asked, [TOKEN] * count, versions, finish, **meta)


def flat_topk(values: np.ndarray, ids: np.ndarray) -> dict[str, Any]:
    """The fields of a reply's meta_info for top-K log-probs and ids, [R, K] each."""
    meta: dict[str, Any] = {
        "output_top_logprobs_shape": list(ids.shape),
        "output_top_logprobs_null_prefix": 0,
    }
    for key, array, dtype in (("val", values.astype("<f4"), "float32"), ("idx", ids.astype("<i4"), "int32")):
        flat = f"output_top_logprobs_{key}_flat_b64"
        meta |= {flat: base64.b64encode(array.tobytes()).decode(), f"{flat}_dtype": dtype}
    return meta


class _Server(ThreadingHTTPServer):
    """Lets many connections wait. Python has five places; the kernel drops further ones for seconds."""

    request_queue_size = 1024


@dataclass
class StandIn:
    """A server that runs, and what a test wants of it."""

    num_retractions: Callable[[str], int] = lambda rid: 0  # of a request, by its id
    fails_first: Callable[[str], bool] = lambda rid: False  # fails a request with 500 at its first attempt
    host: str = "127.0.0.1"  # listens on it
    url: str = ""
    num_asked: Counter[str] = field(default_factory=Counter[str])
    is_started: bool = False
    connections: set[socket.socket] = field(default_factory=set[socket.socket])
    keys: list[str | None] = field(default_factory=list[str | None])
    """The Authorization header of each call."""

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        """Status and JSON; status 0 closes the connection without a reply.

        Bytes are sent as they are. Parts of an iterator are sent one by one, and the body never gets its end.
        `is_gone` tells whether the client has closed its connection meanwhile.
        """
        if path == "/generate":
            rid, _, _ = body["rid"].partition("#")  # as the run names it
            self.num_asked[rid] += 1
            if self.num_asked[rid] == 1 and self.fails_first(rid):
                return 500, {"error": {"message": "as the test wants it"}}
            return 200, answer(body, self.num_retractions(rid))
        return 200, _GETS.get(path, _IDLE if path.startswith("/v1/loads") else None)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Answer on a port of the host inside the block."""
        self.start()
        try:
            yield self
        finally:
            if self.is_started:
                self.stop()

    def start(self) -> None:
        """Answer from now on; after a `stop`, on the port that it had."""
        address = (self.host, int(self.url.rpartition(":")[2] or 0))
        self._server = _Server(address, _handler(self))
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://{self.host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.is_started = True

    def stop(self) -> None:
        """Answer no more, and break all connections, as a process does that ends."""
        self.is_started = False
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(*servers: StandIn) -> Iterator[list[str]]:
    """Let all of them serve inside the block, and return their URLs."""
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running())
        yield [server.url for server in servers]


@dataclass
class LiveStandIn(StandIn):
    """A server of one model's tokens, which runs many requests at once, with `token_s` seconds per token.

    The reply to a request depends on its id and on the token's position alone, so that a response that
    resumed with other weights, or on another server, equals the uninterrupted one.
    """

    end_token: int = 0
    tokens: tuple[int, ...] = (TOKEN,)
    is_marked: Callable[[str], bool] = lambda rid: False
    """Whether the response to a request is made of the last of `tokens`; no other one has it."""
    first_push_interrupts: Callable[[str], bool] = lambda rid: False
    """Whether a response gets its second token only after the first push of a run that has begun."""
    token_s: float = 0.02
    version: int = 0
    before: Callable[[str, int], tuple[int, Any] | None] = lambda path, number: None
    """Called before each reply with the call's path and its number (from 1) for this path. What it
    returns is the reply, unless it returns None."""
    is_paused: bool = False
    running_ids: dict[str, threading.Event] = field(default_factory=dict[str, threading.Event])
    """The requests that it works on, and what aborts them."""
    unfinished: list[str] = field(default_factory=list[str])
    """Ids of the requests whose clients went away."""
    num_calls: Counter[str] = field(default_factory=Counter[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._answers.set()

    @property
    def answers(self) -> bool:
        """Whether it runs, and does not hang."""
        return self.is_started and self._answers.is_set()

    def hang(self) -> None:
        """Accept connections without a reply, until `wake`."""
        self._answers.clear()

    def wake(self) -> None:
        """Reply again."""
        self._answers.set()

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        """See `StandIn.respond`."""
        with self._lock:
            self.num_calls[path] += 1
            number = self.num_calls[path]
        if (said := self.before(path, number)) is not None:
            return said
        while not self._answers.wait(0.02) and not is_gone():
            pass
        if path == "/generate":
            return self._generate(body, is_gone)
        if path == "/abort_request":
            self._abort(body.get("rid", ""))  # a cut request names none
        elif path == "/pause_generation":
            self.is_paused = True
            while self.running_ids:
                for rid in list(self.running_ids):
                    self._abort(rid)
                time.sleep(0.005)
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == _PUSH:
            if not self.is_paused or not list(Path(body["model_path"]).glob("*.safetensors")):
                return 400, {"success": False, "message": f"paused: {self.is_paused}, {body['model_path']}"}
            self.version = int(body["weight_version"])
            return 200, {"success": True}
        elif path == "/model_info":
            return 200, {"model_path": "model", "weight_version": str(self.version)}
        elif path.startswith("/v1/loads"):
            return 200, {"loads": [{"num_running_reqs": len(self.running_ids), "num_waiting_reqs": 0}]}
        return 200, _GETS.get(path)

    def _abort(self, rid: str) -> None:
        if (aborted := self.running_ids.get(rid)) is not None:
            aborted.set()

    def _generate(self, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        rid, limit, start = body["rid"], body["sampling_params"]["max_new_tokens"], len(body["input_ids"])
        while self.is_paused and not is_gone():
            time.sleep(self.token_s)
        with self._lock:
            if rid in self.running_ids:
                return 400, {"error": {"message": f"Duplicate request ID detected: {rid}"}}
            aborted = self.running_ids[rid] = threading.Event()
            self.num_asked[rid] += 1
        tokens, versions = list[int](), list[int]()
        try:
            finish = ""
            while not finish:
                is_aborted = aborted.wait(self.token_s)
                while not self._answers.wait(0.02) and not is_gone():
                    pass
                if is_gone():
                    self.unfinished.append(rid)
                    return 499, None
                if is_aborted:
                    finish = "abort"
                    break
                if tokens and self.num_calls[_PUSH] == 1 and self.first_push_interrupts(rid):
                    continue
                draw = zlib.crc32(f"{rid} {start + len(tokens)}".encode())
                is_marked = self.is_marked(rid)
                is_end = draw % 12 == 0 and not (is_marked and not tokens)  # a marked one has a marked token
                token = self.tokens[-1 if is_marked else draw % max(len(self.tokens) - 1, 1)]
                tokens.append(self.end_token if is_end else token)
                versions.append(self.version)
                finish = "stop" if is_end else "length" if len(tokens) == limit else ""
        finally:
            del self.running_ids[rid]
        return 200, reply(body, tokens, versions, finish)


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            stand_in.connections.add(self.connection)

        def finish(self) -> None:
            stand_in.connections.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def handle(self) -> None:
            with suppress(ConnectionError):
                super().handle()

        def do_POST(self) -> None:
            stand_in.keys.append(self.headers.get("Authorization"))
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with suppress(ConnectionError):  # the client, or a test, has closed it
                status, content = stand_in.respond(self.path, json.loads(sent or b"{}"), self._is_gone)
                if not status:
                    self.close_connection = True
                elif isinstance(content, Iterator):
                    self._send_parts(status, content)
                elif isinstance(content, bytes):
                    self._send(status, content)
                else:
                    self._send(status, b"" if content is None else json.dumps(content).encode())

        do_GET = do_POST

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_parts(self, status: int, parts: Iterator[bytes]) -> None:
            self.close_connection = True
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in parts:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))

        def _is_gone(self) -> bool:
            try:
                return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
