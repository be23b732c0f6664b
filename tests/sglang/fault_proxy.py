"""A small HTTP proxy in front of one real server, which corrupts the replies to chosen requests."""

import asyncio
import base64
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

Body = dict[str, Any]
_UPSTREAM_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Fault:
    """How the server's reply to one request of /generate is changed."""

    status: int = 200
    delay_s: float = 0.0
    change: Callable[[Body], Body] | None = None
    stands_for: str | None = None  # id of another request, whose reply is sent instead
    is_truncated: bool = False  # the JSON ends in its middle
    is_cut: bool = False  # the connection ends in the middle of the body
    is_lasting: bool = True  # False: only the first reply is spoilt


class FaultProxy:
    """Passes everything on; replies to requests named in `faults` are spoilt, and all are counted by id."""

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self.faults: dict[str, Fault] = {}
        self.num_asked: Counter[str] = Counter()
        self.passed: dict[str, list[tuple[Body, Body]]] = {}  # requests by id, and replies
        self._upstream = upstream
        self._answers: dict[str, bytes] = {}

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Listens on a free port, in a separate thread, until the context ends."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="fault proxy")
        thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), loop
        ).result()
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(_close(server), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(method, path, headers, body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client gave up
        finally:
            writer.close()

    async def _answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        kept = {name: headers[name] for name in ("authorization", "content-type") if name in headers}
        async with httpx2.AsyncClient(trust_env=False, timeout=_UPSTREAM_TIMEOUT_S) as http:
            answer = await http.request(method, self._upstream + path, headers=kept, content=body)
        if path != "/generate":
            _send(writer, answer.status_code, answer.content)
            return
        asked = json.loads(body)
        rid, _, _ = asked["rid"].partition("#")
        self.num_asked[rid] += 1
        if answer.status_code == 200:
            self.passed.setdefault(rid, []).append((asked, json.loads(answer.content)))
        self._answers[rid] = answer.content
        fault = self.faults.get(rid, Fault())
        if fault.is_lasting or self.num_asked[rid] == 1:
            await self._spoil(fault, answer.content, writer)
        else:
            _send(writer, answer.status_code, answer.content)

    async def _spoil(self, fault: Fault, content: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(fault.delay_s)
        if fault.stands_for is not None:
            while fault.stands_for not in self._answers:
                await asyncio.sleep(0.01)
            content = self._answers[fault.stands_for]
        if fault.change is not None:
            content = json.dumps(fault.change(json.loads(content))).encode()
        if fault.is_truncated:
            content = content[: len(content) // 2]
        if fault.status != 200:
            content = b'{"error": {"message": "spoilt by the proxy"}}'
        _send(writer, fault.status, content, num_sent=len(content) // 2 if fault.is_cut else None)


def _send(writer: asyncio.StreamWriter, status: int, content: bytes, num_sent: int | None = None) -> None:
    head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(content)}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + content[:num_sent])


async def _close(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def of_routes(change: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int]) -> Callable[[Body], Body]:
    """A change of routed_experts, given int32 [rows, *shape]; what comes back is sent as it is in memory."""

    def changed(body: Body) -> Body:
        data = base64.b64decode(body["meta_info"]["routed_experts"])
        routes = np.frombuffer(data, "<i4").reshape(-1, *shape).copy()
        body["meta_info"]["routed_experts"] = base64.b64encode(change(routes).tobytes()).decode()
        return body

    return changed
