"""Dispatches the requests of one `generate` over several servers, and counts what happens to them."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_dppo.errors import ReplyError, RolloutError, ServerError
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.rollout.engine import Completion, IsEnough, Request, SamplingParams, aborted, input_tokens
from megatron_dppo.rollout.sglang.client import SglangClient
from megatron_dppo.rollout.sglang.protocol import Generation, ServedModel, ServerFacts


@dataclass
class _Place:
    """The load of one server, as this process sees it."""

    num_in_flight: int = 0  # sent by us, and not answered
    num_of_others: int = 0  # what the server last reported beyond those
    is_drained: bool = False

    @property
    def load(self) -> int:
        return self.num_in_flight + self.num_of_others


class LoadBalancer:
    """Chooses a server for each request of one `generate`; sends no request itself.

    Two servers are drawn at random, and the less loaded gets the request: with many processes that send to the
    same servers, all of them on the least loaded one would be as bad as all on any. The requests of a group go
    where its last one went, since that server has the prompt in its cache, unless it is drained or full.
    """

    def __init__(self, urls: Sequence[str], max_in_flight: int, chance: random.Random | None = None) -> None:
        """Start with all servers admitted and idle.

        Args:
            urls: The servers.
            max_in_flight: Requests of this process that one server is given at a time.
            chance: Draws the two; none: of its own.
        """
        self._places = {url: _Place() for url in urls}
        self._max_in_flight = max_in_flight
        self._homes: dict[str, str] = {}
        self._chance = chance or random.Random()

    @property
    def serving(self) -> tuple[str, ...]:
        """Servers that are not drained."""
        return tuple(url for url, place in self._places.items() if not place.is_drained)

    def take(self, group: str) -> str | None:
        """Return the server for one more request of `group`, and count it as sent; none where all are full."""
        free = [url for url in self.serving if self._places[url].num_in_flight < self._max_in_flight]
        if not free:
            return None
        url = self._homes.get(group)
        if url not in free:
            url = self._less_loaded(free)
            self._homes[group] = url
        self._places[url].num_in_flight += 1
        return url

    def give_back(self, url: str) -> None:
        """Count a request of ours as no longer at the server, answered or not."""
        place = self._places[url]
        assert place.num_in_flight > 0, "what is given back was taken"
        place.num_in_flight -= 1

    def report(self, url: str, num_requests: int) -> None:
        """Update a server's load: the requests that it runs or has waiting, ours among them."""
        place = self._places[url]
        place.num_of_others = max(num_requests - place.num_in_flight, 0)

    def drain(self, url: str) -> None:
        """Send the server no more requests; each one it still has needs its `give_back`."""
        self._places[url].is_drained = True

    def _less_loaded(self, free: Sequence[str]) -> str:
        drawn = self._chance.sample(free, min(2, len(free)))
        return min(drawn, key=lambda url: self._places[url].load)


def group_of(request_id: str) -> str:
    """Return the group of a request: its id up to the last "+"."""
    return request_id.rpartition("+")[0] or request_id


logger = logging.getLogger(__name__)

_MAX_SERVERS = 3  # that one request is given to: one that ends servers must not end them all
_ASK_LOAD_S = 2.0
_ABORT_AGAIN_S = 1.0


@dataclass(frozen=True)
class Link:
    """A connected server: its client, and the protocol adapter of its version."""

    client: SglangClient
    generation: Generation
    facts: ServerFacts


@dataclass(frozen=True)
class _InFlight:
    """A request that was sent to a server and is not answered yet."""

    index: int  # of the request
    url: str


_Task = asyncio.Task[Completion | RolloutError]


class Dispatcher:
    """Sends each request to the least loaded server, and to another where one fails; used once, in one loop.

    Attributes:
        errors: Why requests were given up, by their ids.
        counts: Requests that were given up or moved, and what servers said of their answers.
    """

    def __init__(self, links: Mapping[str, Link], model: ServedModel, version: int, max_in_flight: int) -> None:
        """Keep the servers; sends no request.

        Args:
            links: The servers by URL.
            model: What they serve.
            version: Of the weights that they hold.
            max_in_flight: Requests that one server is given at a time.
        """
        self._links, self._model, self._version = links, model, version
        self._load_balancer = LoadBalancer(tuple(links), max_in_flight)
        self._is_over = False
        self.errors: dict[str, RolloutError] = {}
        self.counts = EngineCounts()
        self._in_flight: dict[_Task, _InFlight] = {}
        self._answered: asyncio.Queue[_Task] = asyncio.Queue()

    async def run(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough | None = None
    ) -> list[Completion]:
        """Send the requests, and return their completions in order: aborted ones where no usable answer came.

        Args:
            requests: Their ids differ.
            params: How to sample.
            is_enough: Told of each request that was answered or given up; once it says so, the rest is aborted.

        Raises:
            ServerError: No server is left.
        """
        self._is_enough = is_enough
        self._requests, self._params = requests, params
        self._waiting = deque(range(len(requests)))
        self._num_moves = [0] * len(requests)
        self._completions = [aborted(request) for request in requests]
        self._beside = [asyncio.create_task(self._ask_loads())]
        try:
            while self._waiting or self._in_flight:
                self._send()
                await self._take_answer(await self._answered.get())
        finally:
            await _end([*self._beside, *self._in_flight])
        self.counts += EngineCounts(num_requeued=sum(self._num_moves))
        return [
            replace(completion, num_moves=completion.num_moves + num_moves)
            for completion, num_moves in zip(self._completions, self._num_moves, strict=True)
        ]

    def _send(self) -> None:
        """Send the servers as many requests as they have room for."""
        while self._waiting:
            url = self._load_balancer.take(group_of(self._requests[self._waiting[0]].id))
            if url is None:
                return
            index = self._waiting.popleft()
            task = asyncio.create_task(self._ask(self._links[url], self._requests[index]))
            self._in_flight[task] = _InFlight(index, url)
            task.add_done_callback(self._answered.put_nowait)

    async def _ask(self, link: Link, request: Request) -> Completion | RolloutError:
        """Return the checked answer to one request, or the error in its place."""
        try:
            body = await link.client.generate(link.generation.generate_body(request, self._params, self._model))
            return link.generation.read_reply(body, request, self._params, self._model)
        except (ServerError, ReplyError) as error:
            return error

    async def _take_answer(self, task: _Task) -> None:
        """Keep an answer, or ask another server where this one is at fault."""
        sent = self._in_flight.pop(task, None)
        if sent is None:
            return  # cancelled, and sent again
        self._load_balancer.give_back(sent.url)
        answer = task.result()
        fault = await self._fault_of_server(self._requests[sent.index], sent.url, answer)
        if fault is not None:
            self._drain(sent.url, fault)
            self._send_again([sent], fault)
        else:
            self._keep(sent.index, answer)

    def _keep(self, index: int, answer: Completion | RolloutError) -> None:
        """Keep and count the answer; once enough of them came, abort the rest."""
        request = self._requests[index]
        self.counts += _counted(request, answer)
        if isinstance(answer, RolloutError):
            logger.warning("request %s is dropped: %s", request.id, answer)
            self.errors[request.id] = answer
        else:
            if answer.routes_fault is not None:
                logger.warning("request %s has no routes: %s", request.id, answer.routes_fault)
            self._completions[index] = answer
        if self._is_enough is not None and self._is_enough(self._completions[index]):
            self._is_enough = None
            self._is_over = True
            self._waiting.clear()
            self._beside.append(asyncio.create_task(self._abort_in_flight()))

    async def _abort_in_flight(self) -> None:
        """Abort the requests in flight; repeated, since one may not have reached its server."""

        async def abort(sent: _InFlight) -> None:
            with suppress(ServerError):
                await self._links[sent.url].client.abort(self._requests[sent.index].id)

        while True:
            await asyncio.gather(*map(abort, self._in_flight.values()))
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _fault_of_server(
        self, request: Request, url: str, answer: Completion | RolloutError
    ) -> ServerError | None:
        """Return why the request must go to another server; none for a good answer or a faulty request."""
        if isinstance(answer, Completion):
            num_old = request.partial.tokens.numel() if request.partial else 0  # sampled by older weights
            versions = {span.version for span in answer.weight_versions if span.stop > num_old}
            others = sorted(versions - {self._version})
            return other_weights(url, others[0], self._version) if others else None
        if not isinstance(answer, ServerError):
            return None
        is_drained = url not in self._load_balancer.serving
        return answer if is_drained or not await self._links[url].client.is_healthy() else None

    def _drain(self, url: str, fault: ServerError) -> None:
        """Send a server no more requests, and requeue those it has; answers already received are kept.

        Raises:
            ServerError: It was the last.
        """
        if url not in self._load_balancer.serving:
            return
        self._load_balancer.drain(url)
        logger.warning("server %s is drained: %s", url, fault)
        if not self._load_balancer.serving:
            raise fault
        lost = {task: sent for task, sent in self._in_flight.items() if sent.url == url and not task.done()}
        for task in lost:
            del self._in_flight[task]
            task.cancel()
            self._load_balancer.give_back(url)
        self._send_again(list(lost.values()), fault)

    def _send_again(self, in_flight: Sequence[_InFlight], fault: ServerError) -> None:
        """Queue requests before those that were never sent; give up those that too many servers failed at."""
        for sent in reversed(in_flight):
            if self._is_over:
                return
            if self._num_moves[sent.index] == _MAX_SERVERS - 1:
                self._keep(sent.index, fault)
            else:
                self._num_moves[sent.index] += 1
                self._waiting.appendleft(sent.index)

    async def _ask_loads(self) -> None:
        """Poll the servers' loads, and drain those that no longer answer."""

        async def ask(url: str, link: Link) -> None:
            try:
                self._load_balancer.report(url, link.generation.read_load(await link.client.loads()))
            except ReplyError as error:
                logger.warning("server %s does not say what it has to do: %s", url, error)
            except ServerError as error:
                if len(self._load_balancer.serving) > 1:  # the last one is given up where its requests fail
                    self._drain(url, error)

        while len(self._load_balancer.serving) > 1:
            await asyncio.gather(*(ask(url, self._links[url]) for url in self._load_balancer.serving))
            await asyncio.sleep(_ASK_LOAD_S)


def other_weights(url: str, found: int, expected: int) -> ServerError:
    """Return the error for a server that holds weights of another version."""
    return ServerError(
        f"{url}: found weights of version {found}; expected {expected}. The server was restarted, or someone "
        "else gave it weights: push them again before sampling."
    )


def _counted(request: Request, answer: Completion | RolloutError) -> EngineCounts:
    """Count one answer; what happened to the tokens sampled before was counted when they came."""
    if isinstance(answer, RolloutError):
        is_reply = isinstance(answer, ReplyError)
        return EngineCounts(num_unanswered=not is_reply, num_refused_answers=is_reply)
    before = aborted(request)
    has_new_tokens = answer.tokens.numel() > before.tokens.numel()
    return EngineCounts(
        num_retractions=answer.num_retractions - before.num_retractions,
        num_without_routes=has_new_tokens and answer.routes_fault is not None,
        num_prompt_tokens=len(input_tokens(request)),
        num_cached_tokens=answer.num_cached_tokens - before.num_cached_tokens,
    )


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
