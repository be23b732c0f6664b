"""Runs episodes: a harness in a worker calls the policy over HTTP in place of an environment.

`AgentServer` is the endpoint on the loopback, in its own thread. It passes calls on to their episodes' loops.
"""

import asyncio
import hashlib
import hmac
import inspect
import json
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar, cast

from aiohttp import web

from megatron_dppo.agents import messages, responses
from megatron_dppo.agents.chat import Chat, RefusedError, Reply, read_chat
from megatron_dppo.agents.episode import Episode, EpisodeLimits
from megatron_dppo.agents.harness import AgentOutcome, EpisodeTask, HarnessPool, checked_outcome
from megatron_dppo.agents.rendering import LibraryRendering, Rendering
from megatron_dppo.config.rollout import AgentConfig, AgentSource, HarnessSource, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import (
    Ask,
    Request,
    SamplingParams,
)
from megatron_dppo.runtime.concurrency import LoopThread
from megatron_dppo.runtime.user_code import digest_of
from megatron_dppo.types import Sample
from megatron_dppo.workers.service import FileDigests, WorkerFault

T = TypeVar("T")
_HOST = "127.0.0.1"
_BACKLOG = 1024  # connections of agents that start together; the kernel drops further ones for a second or more
_LARGEST_BODY = 64 << 20  # bytes
_START_S, _END_S = 60.0, 10.0
_NAME_BYTES = 8  # of a key; the rest authenticates them
Converse = Callable[[Request, SamplingParams, Ask], Awaitable[Sample]]


@dataclass(frozen=True)
class _Protocol:
    """The wire format of one endpoint that samples."""

    read: Callable[[bytes], Chat]
    body: Callable[[Reply, Chat], bytes]
    events: Callable[[Reply, Chat], bytes]
    error: Callable[[RefusedError], Any] = lambda error: error.body


_CHAT = _Protocol(
    read_chat,
    lambda reply, _: reply.json(),
    lambda reply, chat: reply.stream(has_usage=chat.wants_usage),
)
_MESSAGES = _Protocol(messages.read_messages, messages.body_of, messages.events_of, messages.error_of)
_RESPONSES = _Protocol(responses.read_responses, responses.body_of, responses.events_of)
_PROTOCOLS = {"chat/completions": _CHAT, "messages": _MESSAGES, "responses": _RESPONSES}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """Serves open episodes, each under its own key, from `start` to `close`."""

    def __init__(self) -> None:
        """Make a secret for the keys; starts nothing."""
        self._secret, self._open = secrets.token_bytes(16), dict[str, Episode]()
        self._thread = LoopThread("agent server")
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    def start(self) -> None:
        """Listen on a free port."""
        if self._runner is None:
            self.base_url = self._thread.call(self._listen(), _START_S)

    def close(self) -> None:
        """Close all connections, and end the thread."""
        if self._runner is not None:
            self._thread.call(self._runner.cleanup(), _END_S)
            self._runner = None
            self._thread.close(_END_S)

    def open(self, episode: Episode) -> str:
        """Return a new key, with which a harness calls the episode until `seal`."""
        name = secrets.token_hex(_NAME_BYTES)
        key = name + self._signature(name)
        self._open[key] = episode
        return key

    def seal(self, key: str) -> None:
        """Refuse later calls with this key."""
        self._open.pop(key).seal()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=_LARGEST_BODY)
        for prefix in ("", "/e/{key}"):
            app.router.add_route("HEAD", f"{prefix}/", _refusing(self._begin))
            app.router.add_get(f"{prefix}/v1/models", _refusing(self._models))
            for path, protocol in _PROTOCOLS.items():
                handler = _refusing(partial(self._sample, protocol), protocol.error)
                app.router.add_post(f"{prefix}/v1/{path}", handler)
            count = _refusing(self._count_tokens, messages.error_of)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", count)
            app.router.add_post(f"{prefix}/v1/reward", _refusing(self._reward))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, 0, backlog=_BACKLOG).start()
        return f"http://{_HOST}:{self._runner.addresses[0][1]}/v1"

    def _signature(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[: 2 * _NAME_BYTES]

    def _episode(self, request: web.Request) -> Episode:
        """Return the open episode that a request's key names."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.match_info.get("key") or bearer or request.headers.get("x-api-key", "")
        episode = self._open.get(key)
        if episode is not None:
            return episode
        name, signature = key[: 2 * _NAME_BYTES], key[2 * _NAME_BYTES :]
        if hmac.compare_digest(self._signature(name).encode(), signature.encode()):
            raise RefusedError(409, "this episode is over", "episode_over")
        raise RefusedError(401, "unknown key; a harness gets the key of its episode", "invalid_api_key")

    async def _begin(self, request: web.Request) -> web.Response:
        """Start an episode's clock, or only show that the server is there."""
        if "Authorization" in request.headers:
            episode = self._episode(request)
            await _in_loop_of(episode, episode.begin)
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        limits = self._episode(request)
        most = limits.limits.max_prompt_tokens + limits.params.max_response_tokens
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megatron_dppo"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": most}]})

    async def _sample(self, protocol: _Protocol, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await request.read()
        chat, is_retry = protocol.read(body), request.headers.get("x-stainless-retry-count", "0") != "0"
        reply = await _in_loop_of(episode, lambda: episode.call(chat, body, is_retry=is_retry))
        response = web.Response(body=protocol.body(reply, chat), content_type="application/json")
        if chat.is_stream:
            response = web.Response(body=protocol.events(reply, chat), content_type="text/event-stream")
        is_read = await _is_written(response, request)
        with suppress(RefusedError):  # the episode ended meanwhile
            await _in_loop_of(episode, lambda: episode.note(reply.node, is_read=is_read))
        return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await request.read()
        chat = messages.read_messages(body)
        count = await _in_loop_of(episode, lambda: episode.count(chat))
        return web.json_response({"input_tokens": count})

    async def _reward(self, request: web.Request) -> web.Response:
        episode, body = self._episode(request), await request.read()
        try:
            fields = json.loads(body)
            outcome = checked_outcome(AgentOutcome(fields["reward"], fields.get("info") or {}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RefusedError(400, f"{error}; expected {{reward: number, info: numbers by name}}") from error
        await _in_loop_of(episode, lambda: episode.post(outcome))
        return web.json_response({})


async def _is_written(response: web.Response, request: web.Request) -> bool:
    """Send a response, and return whether the client still was there."""
    if request.transport is None or request.transport.is_closing():
        return False
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        return False
    return True


async def _in_loop_of(episode: Episode, work: Callable[[], Coroutine[Any, Any, T] | T]) -> T:
    """Run work in the event loop that samples the episode."""

    async def run() -> T:
        found = work()
        return await found if inspect.iscoroutine(found) else cast(T, found)

    running = run()
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, episode.loop))
    except asyncio.CancelledError:
        if not episode.is_sealed:
            raise
        raise RefusedError(409, "this episode is over", "episode_over") from None
    except RuntimeError as error:
        running.close()
        raise RefusedError(409, "this episode is over", "episode_over") from error


def _refusing(handler: _Handler, body_of: Callable[[RefusedError], Any] = _CHAT.error) -> _Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            return web.json_response(body_of(error), status=error.status)

    return handle


def harness_pool(source: AgentSource, data: DataConfig) -> HarnessPool:
    """Return workers for an agent's harness or command; starts none."""
    harness, command = (source.name, ()) if isinstance(source, HarnessSource) else (None, source.words)
    return HarnessPool(
        harness,
        command,
        memory_mb=data.reward_memory_mb,
        environment=data.worker_environment,
    )


def rendering_of(tokenizer: Any, options: AgentConfig) -> Rendering:
    """Return what renders the chats of an agent."""
    if options.renderer is None:
        return Rendering(tokenizer, options.thinking)
    return LibraryRendering(tokenizer, options.thinking, options.renderer)


class Agents:
    """The endpoint and the harnesses of a run, from `start` to `close`. Episodes may be in several loops."""

    def __init__(self, options: RolloutConfig, data: DataConfig) -> None:
        """Store the settings of [rollout] and [data]; starts nothing."""
        source = options.source
        assert isinstance(source, AgentSource), "an agent is set"
        self._pool, self._server, self._agent = harness_pool(source, data), AgentServer(), options.agent
        self._limits = EpisodeLimits(
            options.agent.episode_timeout_s,
            options.agent.call_timeout_s,
            options.agent.max_calls,
            options.agent.train,
            data.max_prompt_tokens,
            options.max_turn_tokens,
        )

    def start(self) -> None:
        """Start the endpoint, and load the harness in one worker."""
        self._server.start()
        self._pool.start()

    @property
    def files(self) -> FileDigests:
        """Path and digest of each file that the harnesses have read, and of files that the command names."""
        words = [word for word in self._agent.command if Path(word).is_file()]
        return self._pool.files | {(word, digest_of(word)) for word in words}

    def close(self) -> None:
        """End the workers and the endpoint."""
        self._pool.close()
        self._server.close()

    def converse(self, tokenizer: Any) -> Converse:
        """Return a function that runs one episode; it needs its own tokenizer in each thread."""
        return partial(self._run, rendering_of(tokenizer, self._agent))

    async def _run(self, rendering: Rendering, request: Request, params: SamplingParams, ask: Ask) -> Sample:
        """Run one episode, and return the conversation to train on, with its `episode`.

        A harness that raises, dies or takes too long costs its own sample. An aborted response ends the episode
        without a result.
        """
        self._server.start()
        episode = Episode(request, params, ask, rendering, self._limits)
        key = self._server.open(episode)
        try:
            async with _workdir() as workdir:
                assert request.prompt is not None, "requests of groups name their prompts"
                task = EpisodeTask(request.prompt, self._server.base_url, key, workdir)
                outcome = await self._wait(episode, task)
        finally:
            self._server.seal(key)
        return episode.result(outcome)

    async def _wait(self, episode: Episode, task: EpisodeTask) -> AgentOutcome | str:
        """Return what the harness returns, or why it failed; it is killed if it takes too long."""
        work = asyncio.ensure_future(self._pool.ask_one(task))
        try:
            while not work.done() and not episode.ended.done():
                left = episode.seconds_left()
                if left <= 0:
                    call_s, all_s = self._limits.call_timeout_s, self._limits.episode_timeout_s
                    found = f"the harness worked for {call_s:g} s without a call, or for {all_s:g} s in all"
                    action = "Correct it, or raise rollout.agent.call_timeout_s or episode_timeout_s."
                    return f"prompt {task.prompt.id}: {found}. {action}"
                await asyncio.wait({work, episode.ended}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if episode.ended.done():
                return "the engine ended the episode"
            found = work.result()
            return found.message if isinstance(found, WorkerFault) else found
        finally:
            work.cancel()
            await asyncio.wait({work})


@asynccontextmanager
async def _workdir() -> AsyncIterator[str]:
    """Make a folder for an episode, and remove it after the body, in threads: an agent may leave many files."""
    folder = await asyncio.to_thread(mkdtemp, prefix="episode_")
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
