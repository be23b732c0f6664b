"""Stands for an SGLang 0.5.21 server; tests write its answers, which a real one gives under memory pressure."""

import base64
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dppo.rollout.sglang.protocol import ServedModel
from megatron_dppo.types import ModelRouting

ROUTING = ModelRouting((0, 1, 2), 8, 2)
MODEL = ServedModel(vocab_size=64, num_layers=3, end_tokens=(0,), routing=ROUTING)
TOKEN, LOG_PROB = 3, -0.5
_FACTS = json.loads((Path(__file__).parent / "sglang_replies" / "facts.json").read_text())
_IDLE = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
_GETS = {"/server_info": _FACTS["server_info"], "/model_info": _FACTS["model_info"], "/health": None}


def answer(asked: dict[str, Any], num_retractions: int = 0, num_tokens: int | None = None) -> dict[str, Any]:
    """The JSON that answers a body of /generate: `TOKEN` to the limit, or aborted after `num_tokens`."""
    limit = asked["sampling_params"]["max_new_tokens"]
    count = limit if num_tokens is None else num_tokens
    meta = {
        "id": asked["rid"],
        "finish_reason": {"type": "length", "length": limit} if count == limit else {"type": "abort"},
        "prompt_tokens": len(asked["input_ids"]),
        "completion_tokens": count,
        "cached_tokens": 1,
        "num_retractions": num_retractions,
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
        "output_token_logprobs": [[LOG_PROB, TOKEN, None]] * count,
    }
    if asked["return_routed_experts"]:
        first = np.arange(asked["routed_experts_start_len"], len(asked["input_ids"]) + count - 1) % 7
        routes = np.stack([first, first + 1], axis=-1)[:, None].repeat(3, axis=1)
        meta["routed_experts"] = base64.b64encode(routes.astype("<i4").tobytes()).decode()
    return {"output_ids": [TOKEN] * count, "meta_info": meta}


@dataclass
class StandIn:
    """A server that runs, and what a test wants of it."""

    num_retractions: Callable[[str], int] = lambda rid: 0  # of a request, by its id
    fails_first: Callable[[str], bool] = lambda rid: False  # answers a request with 500 when it first comes
    url: str = ""
    num_asked: Counter[str] = field(default_factory=Counter[str])

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON."""
        if path == "/generate":
            rid = body["rid"]
            self.num_asked[rid] += 1
            if self.num_asked[rid] == 1 and self.fails_first(rid):
                return 500, {"error": {"message": "as the test wants it"}}
            return 200, answer(body, self.num_retractions(rid))
        return 200, _GETS.get(path, _IDLE if path.startswith("/v1/loads") else None)

    @contextmanager
    def running(self) -> Iterator["StandIn"]:
        """Answer on a port of this machine inside the block."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = stand_in.respond(self.path, json.loads(sent or b"{}"))
            body = b"" if content is None else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
