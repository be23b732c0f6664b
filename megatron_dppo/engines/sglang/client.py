"""HTTP client of one SGLang server, with time-outs on every call and a limited number of retries.

| what happened | GET, abort | generate |
|---|---|---|
| no connection, 429, 503: the server did nothing | retried | retried |
| the connection broke, 500, 502, 504, no JSON object, too many bytes | retried | aborted, retried and counted |
| no response in time | retried | aborted; an error, since another attempt would take as long |
| anything else | an error | an error |

Each attempt of a generation has a new id. A server that still works on the previous attempt would refuse the
same id as a duplicate, and its late cleanup by id would abort the new attempt. A retried response may have been
sampled before. Which sample is kept does not depend on its content, unless the failure did, so these retries
have their own count.
"""

import asyncio
import json
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import aiohttp

from megatron_dppo.engines.base import EngineCounts
from megatron_dppo.engines.sglang.protocol import Generation, ServerFacts, generation_of, most_bytes
from megatron_dppo.engines.sglang.records import API_KEY
from megatron_dppo.errors import (
    MegatronDppoError,
    ReplyError,
    RolloutError,
    RoutingReplayError,
    ServerError,
    ShortageError,
)
from megatron_dppo.runtime.files import OF_THIS_MACHINE

T = TypeVar("T")
_NOTHING_WAS_DONE = frozenset({429, 503})
_MAY_HAVE_BEEN_DONE = frozenset({500, 502, 504})
_KEEP_CONNECTION_S = 2.0  # the server closes an idle connection after five seconds
_LONGEST_PAUSE_S = 30.0
_FAILURES = (aiohttp.ClientError, TimeoutError)  # errors of a call without a response
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """Time-outs and retries of the calls to a server."""

    connect_timeout_s: float = 5.0
    control_timeout_s: float = 30.0  # limit of calls that generate nothing
    generate_timeout_s: float = 1800.0  # limit of one response, including its time in the server's queue
    max_attempts: int = 4
    first_pause_s: float = 0.5  # before the second attempt; then doubled, with random jitter


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class _HttpAnswer:
    """A complete HTTP response of any status."""

    status: int
    content: bytes


class SlowServerError(ServerError):
    """A server did not respond in time; another one would take as long."""


class SglangClient:
    """Calls one server in one event loop; `async with` opens and closes its connections."""

    def __init__(self, url: str, patience: Patience | None = None, *, api_key: str | None = None) -> None:
        """Keep the address; sends no request. `counts` has the retries and time-outs since then.

        Args:
            url: "http://host:port" of the server.
            patience: Time-outs and retries.
            api_key: API key that the server was started with; sent with each call.
        """
        self.url, self.counts = url, EngineCounts()
        self.patience = patience or Patience()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None
        self._chance = random.Random()

    async def __aenter__(self) -> "SglangClient":
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONNECTION_S),
            trust_env=False,  # servers are inside the cluster: no proxy
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None, "entered before it is left"
        await self._http.close()
        self._http = None

    async def server_info(self) -> Mapping[str, Any]:
        """Return what the server reports of its version and arguments."""
        info = _json_object(_json(await self._call("GET", "/server_info")))
        if info is None:
            raise ServerError(f"{self.url}/server_info: found no JSON object; expected an SGLang server there.")
        return info

    async def connect(self) -> tuple[Generation, ServerFacts]:
        """Return the adapter for this server's version, and the facts that the server reports."""
        info = await self.server_info()
        model_info = _json_object(_json(await self._call("GET", "/model_info")))
        try:
            generation = generation_of(info.get("version"))
            facts = generation.read_facts(info, model_info or {})
        except ServerError as error:
            raise ServerError(f"{self.url}: {error}") from None
        return generation, facts

    async def is_healthy(self) -> bool:
        """Return whether the server's /health returns 200, without retries."""
        try:
            answer = await self._send("GET", "/health", None, self.patience.control_timeout_s)
        except _FAILURES:
            return False
        return answer.status == 200

    async def is_gone(self) -> bool:
        """Return whether nothing listens at the server's address: its process has ended."""
        try:
            await self._send("GET", "/health", None, self.patience.connect_timeout_s)
        except aiohttp.ClientConnectorError as error:
            return isinstance(error.os_error, ConnectionRefusedError)
        except _FAILURES:
            return False
        return False

    async def loads(self) -> object:
        """Return the JSON of the server's load; the call takes no time of the server's scheduler."""
        return _json(await self._call("GET", "/v1/loads?include=core"))

    async def generate(self, body: Mapping[str, Any], renew: Callable[[], str] | None = None) -> bytes:
        """Post a body of `Generation.generate_body`, and return the response, which resembles a JSON object.

        Args:
            body: Body whose `rid` is the id of the first attempt.
            renew: Returns the `rid` of each further attempt, which its response has too. Default: `new_rid`.
        """
        name = str(body["rid"]).partition("#")[0]
        return await self._call("POST", "/generate", body, renew or partial(new_rid, name))

    async def abort(self, rid: str) -> None:
        """Abort a request. Its response then has the tokens so far. Servers ignore unknown ids."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def command(self, call: Call, timeout_s: float) -> object:
        """Post a call once, without retries, since a repeated call could do harm."""
        where, expected = f"POST {self.url}{call.path}", "success. Look at the server's log."
        try:
            answer = await self._send("POST", call.path, call.body, timeout_s)
        except _FAILURES as error:
            found = str(error) or type(error).__name__
            raise ServerError(f"{where}: found {found}; expected {expected}") from None
        body = _json(answer.content)
        if answer.status != 200 or (_json_object(body) or {}).get("success") is False:
            raise ServerError(f"{where}: found {_words(answer)}; expected {expected}")
        return body

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        renew: Callable[[], str] | None = None,
    ) -> bytes:
        """Make one call with its retries. Only a generation has `renew`, which returns the `rid` of a retry."""
        patience, rid = self.patience, None if body is None or renew is None else str(body["rid"])
        timeout_s = patience.control_timeout_s if rid is None else patience.generate_timeout_s
        found = ""
        kind: type[RolloutError] = ServerError
        for attempt in range(patience.max_attempts):
            if attempt:
                self.counts += EngineCounts(num_retries=1)
                await asyncio.sleep(self._pause_s(attempt))
                if body is not None and renew is not None:
                    rid = renew()
                    body = {**body, "rid": rid}
            try:
                answer = await self._send(method, path, body, timeout_s)
                if answer.status == 200:
                    return answer.content if rid is None else _object(answer.content)
                found, was_done = _words(answer), answer.status in _MAY_HAVE_BEEN_DONE
                if not was_done and answer.status not in _NOTHING_WAS_DONE:
                    break
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                found, was_done = f"no connection ({str(error) or type(error).__name__})", False
                if error.errno in OF_THIS_MACHINE:
                    kind = ShortageError
            except TimeoutError:
                found, was_done = f"no response within {timeout_s:g} s", True
                if rid is not None:
                    self.counts += EngineCounts(num_timed_out=1)
                    await self._give_up(rid)
                    kind = SlowServerError
                    break
            except (aiohttp.ClientError, ReplyError) as error:
                found, was_done = f"a broken response ({str(error) or type(error).__name__})", True
            if was_done and rid is not None:
                is_asked_again = attempt + 1 < patience.max_attempts
                self.counts += EngineCounts(num_maybe_sampled_twice=is_asked_again)
                await self._give_up(rid)
        if kind is ShortageError:
            raise kind(
                f"this machine: found {found} for a call to {self.url}; expected to open one. Raise its limits "
                "of open files and processes (ulimit -n, -u), or lower rollout.sglang.max_concurrent_requests."
            )
        raise kind(
            f"{method} {self.url}{path}: found {found}; expected 200 within {patience.max_attempts} attempts. "
            "Look at the server's log, and check that the server in run/servers still runs."
        )

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> _HttpAnswer:
        """Make one call."""
        assert self._http is not None, "used inside of `async with`"
        connect_s = self.patience.connect_timeout_s
        timeout = aiohttp.ClientTimeout(  # the total is for slow, continuous responses
            total=timeout_s + connect_s, sock_connect=connect_s, sock_read=timeout_s
        )
        url, most = f"{self.url}{path}", most_bytes(body or {})
        async with self._http.request(method, url, json=body, timeout=timeout, allow_redirects=False) as answer:
            parts, size = list[bytes](), 0
            async for part in answer.content.iter_any():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise aiohttp.ClientPayloadError(f"more than the {most} bytes that it may have")
            return _HttpAnswer(answer.status, b"".join(parts))

    async def _give_up(self, rid: str) -> None:
        """Abort a request that the client no longer waits for, if the server can be reached."""
        try:
            await self._send("POST", "/abort_request", {"rid": rid}, self.patience.connect_timeout_s)
        except _FAILURES:
            return

    def _pause_s(self, attempt: int) -> float:
        longest = min(_LONGEST_PAUSE_S, self.patience.first_pause_s * 2 ** (attempt - 1))
        return longest * self._chance.uniform(0.5, 1.0)


async def ask_each(
    work: Mapping[str, Callable[[SglangClient], Awaitable[T]]],
    *,
    timeout_s: float,
    patience: Patience | None = None,
    api_key: str | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> dict[str, T | MegatronDppoError]:
    """Call several servers together, and return what each call returned or why it failed, by URL.

    No server delays another one, and none fails another one's call. `timeout_s` limits all calls together.

    Args:
        work: Calls to each server, by its URL.
        timeout_s: Time after which a server without a result has failed.
        patience: Time-outs and retries of single calls.
        api_key: API key that the servers were started with.
        on_failure: Called at each failure.
    """

    async def ask(url: str, call: Callable[[SglangClient], Awaitable[T]]) -> T | MegatronDppoError:
        try:
            async with asyncio.timeout(timeout_s), SglangClient(url, patience, api_key=api_key) as client:
                return await call(client)
        except TimeoutError:
            fault: MegatronDppoError = ServerError(
                f"{url}: found no response within {timeout_s:g} s; expected one. Look at the server's log."
            )
        except (RolloutError, RoutingReplayError) as error:
            fault = error if url in str(error) else type(error)(f"{url}: {error}")
        on_failure()
        return fault

    found = await asyncio.gather(*(ask(url, call) for url, call in work.items()))
    return dict(zip(work, found, strict=True))


def new_rid(name: str) -> str:
    """Return a new, unique request id that starts with `name`; it is no prefix of another id.

    A server may still hold an earlier attempt, and aborts every request whose id starts with the given one.
    """
    return f"{name}#{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Link:
    """A connected server: its client, and the protocol adapter for its version."""

    client: SglangClient
    generation: Generation
    facts: ServerFacts


async def connect(clients: Sequence[SglangClient], version: int) -> dict[str, Link]:
    """Connect to all servers at once, each within `control_timeout_s`; return links to this version by URL."""

    async def link(client: SglangClient) -> Link | RolloutError:
        timeout_s = client.patience.control_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                generation, facts = await client.connect()
        except TimeoutError:
            found = f"{client.url}/server_info: found no response within {timeout_s:g} s"
            return ServerError(f"GET {found}; expected facts. Look at the server's log.")
        except (ServerError, ReplyError) as error:
            return error
        if facts.weight_version != version:
            return other_weights(client.url, facts.weight_version, version)
        return Link(client, generation, facts)

    of_each = await asyncio.gather(*map(link, clients))
    found = dict(zip((client.url for client in clients), of_each, strict=True))
    links = {url: link for url, link in found.items() if isinstance(link, Link)}
    faults = {url: fault for url, fault in found.items() if isinstance(fault, RolloutError)}
    if not links:
        raise ServerError("\n".join(map(str, faults.values())))
    for url, fault in faults.items():
        logger.warning("server %s is drained: %s", url, fault)
    return links


def other_weights(url: str, found: int, expected: int) -> ServerError:
    """Return the error for a server with weights of another version."""
    return ServerError(
        f"{url}: found weights of version {found}; expected {expected}. The server was restarted, or another "
        "process sent it weights. Push the weights again before sampling."
    )


def _json(content: bytes) -> object:
    """Parse a short response. Return None if it is empty or not JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _json_object(value: object) -> Mapping[str, Any] | None:
    """Return a parsed JSON object; None if it is another value."""
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else None


def _object(content: bytes) -> bytes:
    """Return a response that begins and ends like a JSON object; its reader parses it."""
    if content[:16].lstrip()[:1] != b"{" or content[-16:].rstrip()[-1:] != b"}":
        raise ReplyError(f"no JSON object: {content[:16]!r}...{content[-16:]!r}")
    return content


def _words(answer: _HttpAnswer) -> str:
    """Return a response's status and its shortened message."""
    text = answer.content.decode(errors="replace")
    try:
        body: object = json.loads(text)
        error: object = (_json_object(body) or {}).get("error", body)
        text = str((_json_object(error) or {}).get("message", error))
    except ValueError:
        pass
    remedy = f"; start the trainer with the servers' {API_KEY}" if answer.status in (401, 403) else ""
    return f"status {answer.status} ({text.strip()[:300]}){remedy}"
