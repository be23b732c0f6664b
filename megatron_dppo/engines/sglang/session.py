"""Samples responses one by one on several servers that have weights of one version."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    Session,
    give_up,
)
from megatron_dppo.engines.sglang.client import Link, SlowServerError, other_weights
from megatron_dppo.engines.sglang.dispatch import (
    NEXT,
    Asked,
    AtFaultError,
    Event,
    InFlight,
    LoadBalancer,
    NotFiniteError,
    Situation,
    State,
    count_result,
    group_of,
    refuse_requests,
)
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.errors import ReplyError, RolloutError, ServerError
from megatron_dppo.runtime.concurrency import end
from megatron_dppo.runtime.process import num_files_left
from megatron_dppo.types import Sample

logger = logging.getLogger(__name__)

_MAX_SERVERS = 3  # for one request: a request that crashes servers must not crash all of them
_ASK_LOAD_S = 2.0
_ABORT_AGAIN_S = 0.1  # pause after the first abort; doubled after each further one
_LONGEST_PAUSE_S = 1.0
_HELD = ServerError("the session is held")
_OTHER_FILES = 64  # open files that are kept free of connections: aborts, checkpoints, workers

_Task = asyncio.Task[Sample]


class ServerSession(Session):
    """Sends each request to a lightly loaded server, and to another one if that fails: see `dispatch.NEXT`.

    Inside its `async with` block, it polls the servers' loads. At the end of
    the block it cancels the requests in flight: a server aborts a request within seconds after its connection
    is closed. All calls must be made in one event loop.

    Attributes:
        is_held: Whether `hold` was called; also True after the session was left.
        errors: Errors of failed requests, by request id. A request that a hold interrupted has no entry.
        refusals: Number of responses that were refused, by the server's URL.
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
            model: Model that the servers serve.
            version: Version of the servers' weights.
            max_in_flight: Largest number of requests in flight at one server, from this session.
            hold_timeout_s: Longest time that a hold waits for a server's next response after an abort.
            may_be_held: Whether responses may be interrupted. If so, they must fit as prompts, to be resumed.
        """
        self._links, self._model, self._version = links, model, version
        self._all_facts = tuple(dict.fromkeys(link.facts for link in links.values()))
        self._load_balancer = LoadBalancer(tuple(links), max_in_flight)
        self._health_locks = {url: asyncio.Lock() for url in links}  # one health check at a time
        self._hold_timeout_s, self._may_be_held = hold_timeout_s, may_be_held
        self.errors = self._errors = dict[str, RolloutError]()
        self.refusals = Counter[str]()
        self._counts = EngineCounts()
        self._ids: set[str] = set()  # of pending requests
        self._waiting = deque[Asked]()
        self._in_flight: dict[_Task, InFlight] = {}
        self._recalled: set[_Task] = set()  # cancelled tasks that have not ended yet
        self._tasks: list[asyncio.Task[None]] = []
        self._hold: asyncio.Task[None] | None = None
        self.is_held = False
        self._fault: ServerError | None = None  # fault of the last server, after all are drained

    async def __aenter__(self) -> "ServerSession":
        self._load_balancer.limit(num_files_left() - _OTHER_FILES)
        self._tasks.append(asyncio.create_task(self._ask_loads()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_sending()
        self._lose(list(self._in_flight))
        await asyncio.gather(*self._recalled, return_exceptions=True)
        await end(self._tasks)

    @property
    def counts(self) -> EngineCounts:
        """Counts of failed and moved requests, retries, time-outs, retractions and tokens so far."""
        return sum((link.client.counts for link in self._links.values()), self._counts)

    def refuse(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Raise for requests that a server would reject, misread or crash on."""
        is_aborted = self._may_be_held or any(request.partial for request in requests)
        for facts in self._all_facts:
            refuse_requests(requests, params, self._model, facts, is_aborted=is_aborted)

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        """Sample one response; see `Session.ask`."""
        if self.is_held:
            return give_up(request)
        if self._fault is not None:
            raise ServerError(str(self._fault))
        self.refuse([request], params)
        if request.id in self._ids:
            raise RolloutError(
                f"request {request.id}: found a pending request with this id; expected unique ids. "
                "This is a fault of the caller."
            )
        asked = Asked(request, params, asyncio.get_running_loop().create_future())
        self._ids.add(request.id)
        self._waiting.append(asked)
        self._send()
        try:
            return await asked.completion
        except asyncio.CancelledError:  # no caller waits for it any more
            if asked.state == "waiting":
                self._waiting.remove(asked)
            self._recall([task for task, sent in self._in_flight.items() if sent.asked is asked])
            self._send()
            raise
        finally:
            self._ids.discard(request.id)

    async def hold(self) -> None:
        """Abort all requests in flight; see `Session.hold`.

        Aborts are repeated, since an abort may overtake its request. If a server sends no response for
        `hold_timeout_s`, its requests are cancelled, and return the tokens that they had when they were sent. A
        hold takes longer only while responses arrive. Each arrives within the client's `generate_timeout_s`.
        """
        self._stop_sending()
        if self._hold is None:
            self._hold = asyncio.create_task(self._abort_in_flight())
            self._tasks.append(self._hold)
        await asyncio.wait({self._hold})  # several callers may wait for it, and may be cancelled
        if not self._hold.cancelled():
            self._hold.result()

    def _send(self) -> None:
        """Send waiting requests until every server is full."""
        while self._waiting:
            asked = self._waiting[0]
            if asked.refusal is not None and self._is_refused_by_all(asked):
                self._end(self._waiting.popleft(), "dropped", asked.refusal)
                continue
            url = self._load_balancer.take(group_of(asked.request.id), asked.refused_by)
            if url is None:
                return
            self._waiting.popleft()
            asked.state, sent = "sent", InFlight(asked, url)
            task = asyncio.create_task(self._call(sent))
            self._in_flight[task] = sent
            task.add_done_callback(self._on_end)

    async def _call(self, sent: InFlight) -> Sample:
        """Send a request to its server, and check the response."""
        asked, url, link = sent.asked, sent.url, self._links[sent.url]
        request = replace(asked.request, id=sent.rid)
        try:
            body = link.generation.generate_body(request, asked.params, self._model)
            content = await link.client.generate(body, sent.renew)
            request = replace(request, id=sent.rid)
            completion = await link.generation.read_reply(content, request, asked.params, self._model)
        except ServerError as error:
            if await self._is_at_fault(url):
                raise AtFaultError(error) from None
            raise
        num_old = request.partial.tokens.numel() if request.partial else 0  # tokens of older weights
        versions = {span.version for span in completion.weight_versions if span.stop > num_old}
        if others := sorted(versions - {self._version}):
            raise AtFaultError(other_weights(url, others[0], self._version))
        completion = replace(completion, id=asked.request.id)
        if not completion.has_finite_log_probs:
            raise NotFiniteError(url, completion)
        return completion

    async def _is_at_fault(self, url: str) -> bool:
        """Return whether a failed server is drained or unhealthy; True without a check in a held session."""
        async with self._health_locks[url]:
            if self.is_held or url not in self._load_balancer.serving:
                return True
            return not await self._links[url].client.is_healthy()

    def _on_end(self, task: _Task) -> None:
        """Handle a finished task: end its request, or move it if the server failed; then send others."""
        sent = self._in_flight.pop(task, None)
        if sent is None:
            return  # recalled
        self._load_balancer.give_back(sent.url)
        if task.cancelled():  # by the event loop, which is closing
            sent.asked.completion.cancel()
        elif (error := task.exception()) is None:
            self._load_balancer.accept(sent.url)
            self._end(sent.asked, "answered", task.result())
            self._drain_at_fault("the last ones are logged above")
        elif isinstance(error, AtFaultError):
            (fault,) = error.args
            self._remove(sent.url, fault)
            self._move(sent.asked, "lost", fault)
        elif isinstance(error, ReplyError | ServerError):
            self._refuse(sent, error)
        else:
            sent.asked.fail(error)
        asyncio.get_running_loop().call_soon(self._send)  # callers of `ask` run first: they may hold

    def _refuse(self, sent: InFlight, error: ReplyError | ServerError) -> None:
        """Count a refused response of a server; drain it if another server's responses are not refused."""
        asked, url, is_slow = sent.asked, sent.url, isinstance(error, SlowServerError)
        asked.refused_by.add(url)
        asked.refusal = error.completion if isinstance(error, NotFiniteError) else error
        self.refusals[url] += 1
        if not is_slow:
            self._load_balancer.refuse(url)
        self._move(asked, "slow" if is_slow else "refused", asked.refusal)
        if asked.state == "waiting":
            logger.warning("request %s moves to another server: %s", asked.request.id, error)
        self._drain_at_fault(str(error))

    def _drain_at_fault(self, last: str) -> None:
        for url in self._load_balancer.at_fault:
            found = f"found {self.refusals[url]} responses that are refused while another server's are not"
            self._remove(url, ServerError(f"{url}: {found}; expected sound ones. The last: {last}"))

    def _move(self, asked: Asked, event: Event, reason: Sample | RolloutError) -> None:
        """Bring a request into its next state after an event; a waiting one is at the head of the queue."""
        state = NEXT[event, self._situation(asked, event)]
        if state != "waiting":
            self._end(asked, state, reason)
            return
        asked.state = state
        asked.num_moves += 1
        self._counts += EngineCounts(num_requeued=1)
        self._waiting.appendleft(asked)

    def _situation(self, asked: Asked, event: Event) -> Situation:
        if self.is_held:
            return "held"
        if self._fault is not None:
            return "no server"
        is_last = asked.num_moves == _MAX_SERVERS - 1 or (event == "refused" and self._is_refused_by_all(asked))
        return "last try" if is_last else "open"

    def _is_refused_by_all(self, asked: Asked) -> bool:
        return asked.refused_by.issuperset(self._load_balancer.serving)

    def _end(self, asked: Asked, state: State, content: Sample | RolloutError) -> None:
        """End a request: count its result and complete it, with an aborted completion for an error."""
        asked.state, request = state, asked.request
        if state == "given up":
            asked.complete(give_up(request))
            return
        if state == "failed":
            asked.fail(ServerError(str(self._fault)))
            return
        self._counts += count_result(request, content)
        if isinstance(content, RolloutError):
            logger.warning("request %s is dropped: %s", request.id, content)
            self._errors[request.id] = content
            content = give_up(request)
        elif content.routes_fault is not None:
            logger.warning("request %s has no routes: %s", request.id, content.routes_fault)
        asked.complete(content)

    def _remove(self, url: str, fault: ServerError) -> None:
        """Stop sending requests to a server, and move its requests in flight. Received responses are kept.

        A held session drains no server, since its other requests would lose the tokens that they have so far.
        """
        if self.is_held or url not in self._load_balancer.serving:
            return
        self._load_balancer.drain(url)
        logger.warning("server %s is drained: %s", url, fault)
        if not self._load_balancer.serving:
            self._fault = fault
            while self._waiting:
                self._move(self._waiting.pop(), "lost", fault)
        self._lose(self._at(url), fault)

    def _recall(self, tasks: Iterable[_Task]) -> list[Asked]:
        """Cancel the tasks that have no response yet, and return their requests in the order of sending."""
        found = [task for task in tasks if task in self._in_flight and not task.done()]
        recalled = [self._in_flight.pop(task) for task in found]
        for task, sent in zip(found, recalled, strict=True):
            self._load_balancer.give_back(sent.url)
            self._recalled.add(task)
            task.add_done_callback(self._recalled.discard)
            task.cancel()
        return [sent.asked for sent in recalled]

    def _lose(self, tasks: Iterable[_Task], fault: ServerError = _HELD) -> int:
        """Cancel the tasks that have no response yet, move their requests, and return their number."""
        lost = self._recall(tasks)
        for asked in reversed(lost):  # the first one is the next to be sent
            self._move(asked, "lost", fault)
        return len(lost)

    def _stop_sending(self) -> None:
        """Stop sending, and complete the waiting requests with their earlier tokens."""
        self.is_held = True
        while self._waiting:
            self._move(self._waiting.popleft(), "lost", _HELD)

    async def _abort_in_flight(self) -> None:
        """Abort at every server until no request is in flight; late ones are cancelled."""
        repeated = [asyncio.create_task(self._repeat_aborts(url)) for url in self._links]
        self._tasks += repeated
        await asyncio.gather(*map(self._await_answers, self._links))
        await end(repeated)

    async def _repeat_aborts(self, url: str) -> None:
        """Abort one server's requests repeatedly, until none is in flight."""

        async def abort(sent: InFlight) -> None:
            with suppress(ServerError):
                await self._links[url].client.abort(sent.rid)

        pause_s = _ABORT_AGAIN_S
        while found := self._at(url):
            await asyncio.gather(*map(abort, found.values()))
            await asyncio.wait(found, timeout=pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _await_answers(self, url: str) -> None:
        """Wait for one server's responses; cancel the rest after `hold_timeout_s` without a response."""
        while found := self._at(url):
            answered, _ = await asyncio.wait(
                found, timeout=self._hold_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not answered:
                num_cancelled = self._lose(found)
                await asyncio.gather(*self._recalled, return_exceptions=True)
                logger.warning(
                    "server %s sent no response for %d aborted requests within %g s; they keep the tokens that "
                    "they had when they were sent. Look at the server's log.",
                    url,
                    num_cancelled,
                    self._hold_timeout_s,
                )

    def _at(self, url: str) -> dict[_Task, InFlight]:
        """Return the requests in flight at a server, in the order of sending."""
        return {task: sent for task, sent in self._in_flight.items() if sent.url == url}

    async def _ask_loads(self) -> None:
        """Poll the servers' loads, and drain servers that do not respond."""

        async def ask(url: str, link: Link) -> None:
            try:
                self._load_balancer.report(url, link.generation.read_load(await link.client.loads()))
            except ReplyError as error:
                logger.warning("server %s does not report its load: %s", url, error)
            except ServerError as error:
                if len(self._load_balancer.serving) > 1:  # the last server is drained only when a request fails
                    self._remove(url, error)
                    self._send()

        async def keep_asking(url: str, link: Link) -> None:  # no server waits for another one's reply
            while url in (serving := self._load_balancer.serving) and len(serving) > 1 and not self.is_held:
                await ask(url, link)
                await asyncio.sleep(_ASK_LOAD_S)

        await asyncio.gather(*(keep_asking(url, link) for url, link in self._links.items()))
