"""HTTP client of one SGLang server: time-outs on every call, bounded retries, errors that say what to do.

| what happened | GET, abort | generate |
|---|---|---|
| no connection, 429, 503: nothing was done | asked again | asked again |
| the connection broke, 500, 502, 504, no JSON object | asked again | aborted, asked again, and counted |
| no answer in time | asked again | aborted; an error: another try would take as long |
| anything else | an error | an error |

A generation has another id at each attempt: a server that still works on the last one would refuse it as a
duplicate, and clean up behind it later, by its id. A response that is asked for again may have been sampled
before. Which one is kept does not depend on what it says, unless the failure did; so these are counted, apart
from other retries.
"""

import asyncio
import json
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import aiohttp

from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.protocol import Generation, ServerFacts, generation_of
from megatron_dppo.engines.sglang.update_calls import Call
from megatron_dppo.errors import ReplyError, ServerError

_NOTHING_WAS_DONE = frozenset({429, 503})
_MAY_HAVE_BEEN_DONE = frozenset({500, 502, 504})
_KEEP_CONNECTION_S = 2.0  # below the five seconds after which the server closes an idle connection
_LONGEST_PAUSE_S = 30.0
_FAILURES = (aiohttp.ClientError, TimeoutError)  # of a call that has no answer


@dataclass(frozen=True)
class Patience:
    """Time-outs and retries of the calls to a server."""

    connect_timeout_s: float = 5.0
    control_timeout_s: float = 30.0  # calls that generate nothing
    generate_timeout_s: float = 1800.0  # one response, its time in the server's queue included
    max_attempts: int = 4
    first_pause_s: float = 0.5  # before the second attempt; then doubled, and each shortened by chance


@dataclass(frozen=True)
class _HttpAnswer:
    """A whole answer, whatever its status."""

    status: int
    content: bytes


class SglangClient:
    """Calls one server, within one event loop: `async with` opens and closes its connections."""

    def __init__(self, url: str, patience: Patience | None = None, *, api_key: str | None = None) -> None:
        """Keep the address; sends no request. `counts` is of the retries and time-outs since.

        Args:
            url: "http://host:port" of the server.
            patience: Time-outs and retries.
            api_key: Sent with each call; what the server was started with.
        """
        self.url, self.counts = url, EngineCounts()
        self._patience = patience or Patience()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession | None = None
        self._chance = random.Random()

    async def __aenter__(self) -> "SglangClient":
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONNECTION_S),
            trust_env=False,  # engines stand inside the cluster: no proxy
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None, "entered before it is left"
        await self._http.close()
        self._http = None

    async def connect(self) -> tuple[Generation, ServerFacts]:
        """Return the adapter for this server, and the facts that it reports of itself.

        Raises:
            ServerError: It does not answer, is of an unknown version, or has options that we refuse.
        """
        info = _json(await self._call("GET", "/server_info"))
        if not isinstance(info, Mapping):
            raise ServerError(f"{self.url}/server_info: found no JSON object; expected an SGLang server there.")
        generation = generation_of(info.get("version"))
        model_info = _json(await self._call("GET", "/model_info"))
        try:
            facts = generation.read_facts(info, model_info if isinstance(model_info, Mapping) else {})
        except ServerError as error:
            raise ServerError(f"{self.url}: {error}") from None
        return generation, facts

    async def is_healthy(self) -> bool:
        """Whether the server answers /health, asked once."""
        try:
            answer = await self._send("GET", "/health", None, self._patience.control_timeout_s)
        except _FAILURES:
            return False
        return answer.status == 200

    async def loads(self) -> object:
        """Return the JSON of the server's load; the call costs its scheduler no time."""
        return _json(await self._call("GET", "/v1/loads?include=core"))

    async def generate(self, body: Mapping[str, Any], renew: Callable[[], str] | None = None) -> bytes:
        """Post a `Generation.generate_body`, and return the answer, which looks like a JSON object.

        Args:
            body: Its `rid` is for the first attempt.
            renew: Returns the `rid` of each further attempt, which the answer then has; none: `new_rid` does.

        Raises:
            ServerError: The server refuses the request, or did not answer in time or in `max_attempts`.
        """
        name = str(body["rid"]).partition("#")[0]
        return await self._call("POST", "/generate", body, renew or partial(new_rid, name))

    async def abort(self, rid: str) -> None:
        """Abort a request; its answer then holds the tokens so far. Unknown ids are ignored."""
        await self._call("POST", "/abort_request", {"rid": rid})

    async def command(self, call: Call, timeout_s: float) -> object:
        """Post a call once, without retries, since repeating it could do harm.

        Raises:
            ServerError: The server refuses, fails, or did not answer in time. What it has done is unknown.
        """
        where, expected = f"POST {self.url}{call.path}", "success. Look at the server's log."
        try:
            answer = await self._send("POST", call.path, call.body, timeout_s)
        except _FAILURES as error:
            found = str(error) or type(error).__name__
            raise ServerError(f"{where}: found {found}; expected {expected}") from None
        body = _json(answer.content)
        if answer.status != 200 or (isinstance(body, Mapping) and body.get("success") is False):
            raise ServerError(f"{where}: found {_words(answer)}; expected {expected}")
        return body

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        renew: Callable[[], str] | None = None,
    ) -> bytes:
        """Make one call with its retries; a generation has a `rid`, and `renew` for those of its retries."""
        patience, rid = self._patience, None if body is None or renew is None else str(body["rid"])
        timeout_s = patience.control_timeout_s if rid is None else patience.generate_timeout_s
        found = ""
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
            except TimeoutError:
                found, was_done = f"no answer within {timeout_s:g} s", True
                if rid is not None:
                    self.counts += EngineCounts(num_timed_out=1)
                    await self._give_up(rid)
                    break
            except (aiohttp.ClientError, ReplyError) as error:
                found, was_done = f"a broken answer ({str(error) or type(error).__name__})", True
            if was_done and rid is not None:
                is_asked_again = attempt + 1 < patience.max_attempts
                self.counts += EngineCounts(num_maybe_sampled_twice=is_asked_again)
                await self._give_up(rid)
        raise ServerError(
            f"{method} {self.url}{path}: found {found}; expected 200 within {patience.max_attempts} attempts. "
            "Look at the server's log, and whether run/servers names a server that still runs."
        )

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> _HttpAnswer:
        """Make one call.

        Raises:
            aiohttp.ClientError, TimeoutError: There was no connection, or no whole answer, in time or at all.
        """
        assert self._http is not None, "used inside of `async with`"
        connect_s = self._patience.connect_timeout_s
        timeout = aiohttp.ClientTimeout(  # the sum is for answers that trickle
            total=timeout_s + connect_s, sock_connect=connect_s, sock_read=timeout_s
        )
        url = f"{self.url}{path}"
        async with self._http.request(method, url, json=body, timeout=timeout, allow_redirects=False) as answer:
            return _HttpAnswer(answer.status, await answer.read())

    async def _give_up(self, rid: str) -> None:
        """Abort a request whose answer is no longer awaited, if the server can be reached."""
        try:
            await self._send("POST", "/abort_request", {"rid": rid}, self._patience.connect_timeout_s)
        except _FAILURES:
            return

    def _pause_s(self, attempt: int) -> float:
        longest = min(_LONGEST_PAUSE_S, self._patience.first_pause_s * 2 ** (attempt - 1))
        return longest * self._chance.uniform(0.5, 1.0)


def new_rid(name: str) -> str:
    """Return an id for a request of this name that a server has never seen; no other one begins with it.

    SGLang 0.5.21 cleans up behind an answer some time after it was given, by the request's id: it aborts what
    has this id by then, as the next turn of a conversation would. Later ones look whose id it is.
    """
    return f"{name}#{secrets.token_hex(8)}"


def _json(content: bytes) -> object:
    """Parse a short answer; none for one that says nothing, or is no JSON."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _object(content: bytes) -> bytes:
    """Return an answer that begins and ends as a JSON object; whether it is one, its reader finds out.

    Raises:
        ReplyError: It was cut, or is a page of a proxy.
    """
    if content[:16].lstrip()[:1] != b"{" or content[-16:].rstrip()[-1:] != b"}":
        raise ReplyError(f"no JSON object: {content[:16]!r}...{content[-16:]!r}")
    return content


def _words(answer: _HttpAnswer) -> str:
    """Return status and message of an answer, shortened."""
    text = answer.content.decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return f"status {answer.status} ({text.strip()[:300]})"
