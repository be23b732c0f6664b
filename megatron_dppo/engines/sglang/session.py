"""Samples responses one by one on several servers that hold weights of one version."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from megatron_dppo.engines.base import (
    Completion,
    Request,
    SamplingParams,
    aborted,
)
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.asked import Answer, Asked, InFlight, counted
from megatron_dppo.engines.sglang.links import Link, other_weights
from megatron_dppo.engines.sglang.load_balancer import LoadBalancer, group_of
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.engines.sglang.refusals import refuse_requests
from megatron_dppo.errors import ReplyError, RolloutError, ServerError

logger = logging.getLogger(__name__)

_MAX_SERVERS = 3  # that one request is given to: one that ends servers must not end them all
_ASK_LOAD_S = 2.0
_ABORT_AGAIN_S = 0.1  # after the first abort; then doubled
_LONGEST_PAUSE_S = 1.0


_Task = asyncio.Task[Answer]


class ServerSession:
    """Sends each request to the least loaded server, and to another where one fails; an `engine.Session`.

    `async with` polls the servers' loads inside of the block, and cancels what is in flight when it is left: a
    server aborts a request within seconds once its connection is closed. All calls are made in one event loop.

    Attributes:
        errors: Why requests were given up, by their ids. A request that a hold interrupted has no entry.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        model: ServedModel,
        version: int,
        *,
        max_in_flight: int,
        hold_timeout_s: float,
        may_be_held: bool = True,
    ) -> None:
        """Keep the servers; sends no request.

        Args:
            links: The servers by URL.
            model: What they serve.
            version: Of the weights that they hold.
            max_in_flight: Requests that one server is given at a time, by this session.
            hold_timeout_s: The longest that a hold waits for the next answer of a server to its aborts.
            may_be_held: Whether responses may be aborted, and must then fit as prompts to resume them.
        """
        self._links, self._model, self._version = links, model, version
        self._all_facts = tuple(dict.fromkeys(link.facts for link in links.values()))
        self._load_balancer = LoadBalancer(tuple(links), max_in_flight)
        self._health_locks = {url: asyncio.Lock() for url in links}  # one question at a time
        self._hold_timeout_s, self._may_be_held = hold_timeout_s, may_be_held
        self.errors: dict[str, RolloutError] = {}
        self._counts = EngineCounts()
        self._ids: set[str] = set()  # of the requests that are not settled
        self._waiting = deque[Asked]()
        self._in_flight: dict[_Task, InFlight] = {}
        self._recalled: set[_Task] = set()  # cancelled, and not ended yet
        self._beside: list[asyncio.Task[None]] = []
        self._hold: asyncio.Task[None] | None = None
        self._is_held = False
        self._fault: ServerError | None = None  # of the last server, once none is left

    async def __aenter__(self) -> "ServerSession":
        self._beside.append(asyncio.create_task(self._ask_loads()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_sending()
        await self._cancel(lambda sent: True)
        await _end(self._beside)

    @property
    def counts(self) -> EngineCounts:
        """Requests given up or moved, retries, time-outs, and what servers said of their answers, so far."""
        return sum((link.client.counts for link in self._links.values()), self._counts)

    @property
    def is_held(self) -> bool:
        """See `Session.is_held`; true once the session was left, too."""
        return self._is_held

    def refuse(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Raise for requests that a server would reject, misread or crash on.

        Raises:
            RolloutError: Says which.
        """
        is_aborted = self._may_be_held or any(request.partial for request in requests)
        for facts in self._all_facts:
            refuse_requests(requests, params, self._model, facts, is_aborted=is_aborted)

    async def ask(self, request: Request, params: SamplingParams) -> Completion:
        """Sample one response; see `Session.ask`.

        Raises:
            RolloutError: A server would refuse the request, or one of its id is not answered yet.
            ServerError: No server is left.
        """
        if self._is_held:
            return aborted(request)
        if self._fault is not None:
            raise ServerError(str(self._fault))
        self.refuse([request], params)
        if request.id in self._ids:
            raise RolloutError(
                f"request {request.id}: found it asked for while it is not answered; expected ids that differ. "
                "This is a fault of the caller."
            )
        asked = Asked(request, params, asyncio.get_running_loop().create_future())
        self._ids.add(request.id)
        self._waiting.append(asked)
        self._send()
        try:
            return await asked.completion
        except asyncio.CancelledError:
            self._withdraw(asked)
            raise
        finally:
            self._ids.discard(request.id)

    async def hold(self) -> None:
        """Abort what is in flight; see `Session.hold`.

        Aborts are repeated, since one may overtake its request. Where a server answers nothing for
        `hold_timeout_s`, its requests are cancelled, and come back with the tokens that were sampled before: a
        hold that waits longer is still getting answers, each of them within the client's `generate_timeout_s`.
        """
        self._stop_sending()
        if self._hold is None:
            self._hold = asyncio.create_task(self._abort_in_flight())
            self._beside.append(self._hold)
        await asyncio.wait({self._hold})  # several may wait for it, and be cancelled
        if not self._hold.cancelled():
            self._hold.result()

    def _send(self) -> None:
        """Send the servers as many requests as they have room for."""
        while self._waiting:
            url = self._load_balancer.take(group_of(self._waiting[0].request.id))
            if url is None:
                return
            asked = self._waiting.popleft()
            sent = InFlight(asked, url)
            task = asyncio.create_task(self._call(sent))
            self._in_flight[task] = sent
            task.add_done_callback(self._land)

    async def _call(self, sent: InFlight) -> Answer:
        """Ask one server, check its answer, and judge whether the server is at fault."""
        asked, url, link = sent.asked, sent.url, self._links[sent.url]
        request = replace(asked.request, id=sent.rid)
        try:
            body = link.generation.generate_body(request, asked.params, self._model)
            content = await link.client.generate(body, sent.renew)
            request = replace(request, id=sent.rid)
            completion = await link.generation.read_reply(content, request, asked.params, self._model)
        except ReplyError as error:
            return Answer(error)
        except ServerError as error:
            return Answer(error, error if await self._is_at_fault(url) else None)
        num_old = request.partial.tokens.numel() if request.partial else 0  # sampled by older weights
        versions = {span.version for span in completion.weight_versions if span.stop > num_old}
        others = sorted(versions - {self._version})
        fault = other_weights(url, others[0], self._version) if others else None
        return Answer(replace(completion, request_id=asked.request.id), fault)

    async def _is_at_fault(self, url: str) -> bool:
        """Whether a server that failed at a request is drained or unhealthy; a held session need not know."""
        async with self._health_locks[url]:
            if self._is_held or url not in self._load_balancer.serving:
                return True
            return not await self._links[url].client.is_healthy()

    def _land(self, task: _Task) -> None:
        """Keep an answer, or move the request where the server is at fault; then send what waits."""
        sent = self._in_flight.pop(task, None)
        if sent is None:
            return  # recalled
        self._load_balancer.give_back(sent.url)
        if task.cancelled():  # by the event loop, which is being closed
            sent.asked.completion.cancel()
        elif (error := task.exception()) is not None:
            sent.asked.fail(error)
        elif (fault := task.result().fault) is not None:
            self._drain(sent.url, fault)
            self._move(sent.asked, fault)
        else:
            self._settle(sent.asked, task.result().content)
        asyncio.get_running_loop().call_soon(self._send)  # after those who asked, who may hold the session

    def _settle(self, asked: Asked, content: Completion | RolloutError) -> None:
        """Count an answer, and return it to those who asked; an aborted one in place of an error."""
        request = asked.request
        self._counts += counted(request, content)
        if isinstance(content, RolloutError):
            logger.warning("request %s is dropped: %s", request.id, content)
            self.errors[request.id] = content
            content = aborted(request)
        elif content.routes_fault is not None:
            logger.warning("request %s has no routes: %s", request.id, content.routes_fault)
        asked.complete(content)

    def _drain(self, url: str, fault: ServerError) -> None:
        """Send a server no more requests, and move those it has; answers already received are kept.

        A held session drains none: what its other requests have so far would be lost.
        """
        if self._is_held or url not in self._load_balancer.serving:
            return
        self._load_balancer.drain(url)
        logger.warning("server %s is drained: %s", url, fault)
        if not self._load_balancer.serving:
            self._fault = fault
        lost = self._recall(lambda sent: sent.url == url)
        if self._fault is not None:
            lost += self._waiting
            self._waiting.clear()
        for asked in reversed(lost):
            self._move(asked, fault)

    def _move(self, asked: Asked, fault: ServerError) -> None:
        """Queue a request before those never sent; give it up where too many servers failed at it."""
        if self._is_held:
            asked.complete(aborted(asked.request))
        elif self._fault is not None:
            asked.fail(ServerError(str(self._fault)))
        elif asked.num_moves == _MAX_SERVERS - 1:
            self._settle(asked, fault)
        else:
            asked.num_moves += 1
            self._counts += EngineCounts(num_requeued=1)
            self._waiting.appendleft(asked)

    def _recall(self, is_meant: Callable[[InFlight], bool]) -> list[Asked]:
        """Cancel requests in flight whose answers are not there, and return them in the order of sending."""
        found = {task: sent for task, sent in self._in_flight.items() if is_meant(sent) and not task.done()}
        for task, sent in found.items():
            del self._in_flight[task]
            self._load_balancer.give_back(sent.url)
            self._recalled.add(task)
            task.add_done_callback(self._recalled.discard)
            task.cancel()
        return [sent.asked for sent in found.values()]

    def _withdraw(self, asked: Asked) -> None:
        """Forget a request that nobody waits for any more."""
        if asked in self._waiting:
            self._waiting.remove(asked)
        self._recall(lambda sent: sent.asked is asked)
        self._send()

    def _stop_sending(self) -> None:
        """Send nothing from now on; what waits to be sent comes back as it is."""
        self._is_held = True
        while self._waiting:
            asked = self._waiting.popleft()
            asked.complete(aborted(asked.request))

    async def _cancel(self, is_meant: Callable[[InFlight], bool]) -> int:
        """Cancel requests in flight, and return how many there were; they come back as they were sent."""
        lost = self._recall(is_meant)
        for asked in lost:
            asked.complete(aborted(asked.request))
        await asyncio.gather(*self._recalled, return_exceptions=True)
        return len(lost)

    async def _abort_in_flight(self) -> None:
        """Abort at every server until nothing is in flight, or what is left was cancelled."""
        repeated = [asyncio.create_task(self._repeat_aborts(url)) for url in self._links]
        self._beside += repeated
        await asyncio.gather(*map(self._await_answers, self._links))
        await _end(repeated)

    async def _repeat_aborts(self, url: str) -> None:
        """Abort what is in flight at one server, again and again."""

        async def abort(sent: InFlight) -> None:
            with suppress(ServerError):
                await self._links[url].client.abort(sent.rid)

        pause_s = _ABORT_AGAIN_S
        while found := self._at(url):
            await asyncio.gather(*map(abort, found.values()))
            await asyncio.wait(found, timeout=pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _await_answers(self, url: str) -> None:
        """Wait for the answers of one server; cancel what is left once none came for `hold_timeout_s`."""
        while found := self._at(url):
            answered, _ = await asyncio.wait(
                found, timeout=self._hold_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not answered:
                num_cancelled = await self._cancel(lambda sent: sent.url == url)
                logger.warning(
                    "server %s answered none of %d requests within %g s of their abort; they keep the tokens "
                    "sampled before. Look at its log.",
                    url,
                    num_cancelled,
                    self._hold_timeout_s,
                )

    def _at(self, url: str) -> dict[_Task, InFlight]:
        return {task: sent for task, sent in self._in_flight.items() if sent.url == url}

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
                    self._send()

        while len(self._load_balancer.serving) > 1 and not self._is_held:
            await asyncio.gather(*(ask(url, self._links[url]) for url in self._load_balancer.serving))
            await asyncio.sleep(_ASK_LOAD_S)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
