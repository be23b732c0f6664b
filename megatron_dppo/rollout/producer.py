"""Samples one rank's open groups in a thread of its own, while the trainer trains and pushes weights.

Every response is a task of its own: it waits until sampling goes on, asks, and where a push interrupts it,
keeps what there is and asks again by the new weights. So it ends as soon as it can, is scored at once, and is
not thrown away. Groups are begun as the trainer's thread allows; producers of ranks never communicate.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import (
    Completion,
    ConcurrentEngine,
    Request,
    SamplingParams,
    Session,
    input_tokens,
    num_tokens_before,
    resumed,
)
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.conversations import Conversations
from megatron_dppo.rollout.group_sampling import scored_response
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.open_groups import OpenedGroup, Places, Produced, ProducerState
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.staleness import OpenGroup

T = TypeVar("T")
_ANSWER_S = 120.0  # for what the thread does alone
_HOLD_S = 900.0  # a session's own limit is of silence between answers, and hundreds of long ones are decoded
_CONNECT_S = 1800.0  # far above what the client's own limits for a connection add up to


class Producer:
    """Keeps one rank's groups open, and samples them whenever the servers hold weights that it may sample by.

    The trainer's thread calls the methods. What fails in the producer's thread stays there as `fault`, for the
    trainer's to raise.

    Nothing waits without a limit. A request ends within rollout.sglang.request_timeout_s at each server that
    it is given to, a reward or an environment within its time-out in [data], a hold within the session's. The
    methods raise a RolloutError where the thread itself does not answer in 120 s, or 1800 s for `go_on`.
    The wait for a rollout also ends, with a fault, if all prompts are too long, or if a task was cancelled.
    """

    def __init__(
        self,
        engine: ConcurrentEngine,
        conversations: Conversations,
        maker: GroupMaker,
        scorer: Scorer,
        params: SamplingParams,
        places: Places,
        prompt_at: Callable[[int], Drawn],
        *,
        num_prompts: int,
        num_threads: int = 1,
        max_replaced: int = 0,
    ) -> None:
        """Start the thread; begin no group before `begin_groups`, and sample none before `go_on`.

        Args:
            engine: Has the servers.
            conversations: Samples whole conversations, each for itself.
            maker: Makes groups.
            scorer: Scores each response when it ends.
            params: How to sample.
            places: Of this rank; the producer takes from them.
            prompt_at: The prompt at a place.
            num_prompts: Prompts of an epoch; as many in a row that are too long are a fault.
            num_threads: Prompts that are begun at once, each by its environment.
            max_replaced: Groups of equal rewards that are replaced in each rollout; others stay.
        """
        self._engine, self._conversations = engine, conversations
        self._maker, self._scorer = maker, scorer
        self._params, self._places, self._prompt_at = params, places, prompt_at
        self._max_replaced, self._num_prompts = max_replaced, num_prompts
        self._num_too_long_in_a_row = 0
        self._open: dict[int, OpenedGroup] = {}
        self._produced, self._num_flying, self._changed_at = Produced(), 0, time.monotonic()
        self._taken_at = self._changed_at
        self._fault: BaseException | None = None
        self._session: Session | None = None
        self._version = -1
        self._stack = AsyncExitStack()
        self._tasks = set[asyncio.Task[None]]()
        self._is_ending = False
        self._threads = ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="environment")
        self.news = threading.Event()
        """Set whenever a group became whole, or something failed."""
        self._loop = asyncio.new_event_loop()
        self._held_up: list[tuple[int, asyncio.Future[None]]] = []  # places of what waits until it goes on
        self._thread = threading.Thread(target=self._run, name="rollout producer", daemon=True)
        self._thread.start()

    # What the trainer's thread calls.

    @property
    def fault(self) -> BaseException | None:
        """What ended the producer's work; none while it goes on."""
        return self._fault

    def go_on(self, version: int, limit: int) -> None:
        """Sample by the servers' weights, with up to `limit` groups open.

        Args:
            version: Of these weights.
            limit: Groups that may be open on this rank.

        Raises:
            ServerError: No server answers and holds the weights.
        """
        self._call(self._go_on(version, limit), _CONNECT_S)

    def begin_groups(self, limit: int) -> None:
        """Begin groups until `limit` are open."""
        self._call(self._begin_groups(limit))

    def hold(self) -> Produced:
        """Sample no more until `go_on`; when it returns, no request is at a server. What was sampled stays.

        Returns:
            What happened between the last `take` and this call.
        """
        return self._call(self._hold(), _HOLD_S)

    def state(self) -> ProducerState:
        """Return what is open, and where the next prompts come from."""
        return self._call(self._state())

    def take(self, places: Iterable[int]) -> tuple[list[PromptGroup], Produced]:
        """Remove whole groups, in the order of `places`; return them, and what happened since the last call."""
        return self._call(self._take(places))

    def close(self) -> None:
        """Abort what is at servers, and end the thread; open groups are lost."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self._end(), _HOLD_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_ANSWER_S)
            self._threads.shutdown(wait=False, cancel_futures=True)

    # What the producer's thread does.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the producer's thread, and return its result.

        Raises:
            RolloutError: It takes longer than `timeout_s`; none means `_ANSWER_S`.
        """
        timeout_s = _ANSWER_S if timeout_s is None else timeout_s
        name, future = work.__name__.strip("_"), asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise RolloutError(
                f"thread that samples ahead: found no answer to {name!r} within {timeout_s:g} s; expected one. "
                f"See where process {os.getpid()} is (py-spy dump); started again, the run resumes."
            ) from None

    async def _go_on(self, version: int, limit: int) -> None:
        assert self._session is None, "held before it goes on"
        self._session = await self._stack.enter_async_context(self._engine.session())
        self._version = version
        self._release()
        await self._begin_groups(limit)

    def _release(self) -> None:
        """Let what waits ask again, oldest groups first: servers with a queue keep this order.

        Else those that had waited at servers would come before those that were interrupted, at every push, and
        long responses would lose their turns to younger ones.
        """
        held_up, self._held_up = self._held_up, []
        for _, gate in sorted(held_up, key=lambda each: each[0]):
            if not gate.done():
                gate.set_result(None)

    async def _open_session(self, place: int) -> Session:
        """Wait until sampling goes on."""
        while self._session is None:
            gate = self._loop.create_future()
            self._held_up.append((place, gate))
            await gate
        return self._session

    async def _begin_groups(self, limit: int) -> None:
        while len(self._open) < limit:
            self._begin_next()

    def _begin_next(self) -> None:
        opened = OpenedGroup(self._places.take())
        self._open[opened.place] = opened
        self._start(self._begin(opened))

    def _replace(self, opened: OpenedGroup) -> None:
        """Begin the next group in the place of one; in one step, so that as many as may be are always open."""
        del self._open[opened.place]
        self._begin_next()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
        elif self._is_ending:
            error = None
        else:
            error = RolloutError("thread that samples ahead: found a response cancelled; expected its end")
        if error is not None:
            self._fault = self._fault or error
            self.news.set()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads, work)

    async def _begin(self, opened: OpenedGroup) -> None:
        """Make the group of a place, or of the next where the prompt is too long, and ask for its responses."""
        group = await self._in_thread(lambda: self._maker.begin_at_place(self._prompt_at(opened.place)))
        if group is None:
            self._count(num_too_long=1)
            self._num_too_long_in_a_row += 1
            self._refuse_if_all_too_long()
            self._replace(opened)
            return
        self._num_too_long_in_a_row = 0
        opened.group, count = group, len(group.requests)
        opened.completions, opened.samples = [None] * count, [None] * count
        for index, completion in enumerate(group.completions):
            if completion is None:
                self._start(self._respond(opened, index))
            else:  # the environment did not begin
                await self._keep(opened, index, completion)

    def _refuse_if_all_too_long(self) -> None:
        if self._num_too_long_in_a_row >= self._num_prompts:
            raise RolloutError(
                f"rollout: found {self._num_too_long_in_a_row} prompts in a row longer than "
                f"data.max_prompt_tokens, of {self._num_prompts} that there are; expected some to sample from. "
                "Raise the limit, or shorten the prompts or what environments add."
            )

    async def _respond(self, opened: OpenedGroup, index: int) -> None:
        """Sample one response, over as many versions of the weights as it takes, and score it."""
        request = opened.begun.requests[index]
        completion = await self._conversations.run(request, self._params, partial(self._ask, opened))
        await self._keep(opened, index, completion)

    async def _ask(self, opened: OpenedGroup, request: Request, params: SamplingParams) -> Completion:
        """Ask for one turn; what a push interrupts is gone on with."""
        is_continued = False
        while True:
            session = await self._open_session(opened.place)
            before, version = request.partial, self._version
            opened.born = version if opened.born is None else opened.born
            self._fly(+1)
            try:
                completion = await session.ask(request, params)
            finally:
                self._fly(-1)
            num_new = completion.tokens.numel() - num_tokens_before(request)
            opened.has_tokens |= num_new > 0
            if is_continued and num_new:
                cached = completion.num_cached_tokens - (before.num_cached_tokens if before is not None else 0)
                self._count(num_prefilled_again=len(input_tokens(request)) - cached)
            is_interrupted = session.is_held and request.id not in session.errors
            if completion.finish_reason != "abort" or not is_interrupted:
                return completion
            self._count(num_interrupted=num_new > 0)
            is_continued |= num_new > 0
            rest = resumed(request, completion, params)
            if rest is None:  # interrupted just after its last token
                return replace(completion, finish_reason="length")
            request, params = rest

    async def _keep(self, opened: OpenedGroup, index: int, completion: Completion) -> None:
        """Score a response; a group that is whole then, and of no use, is replaced."""
        sample = await scored_response(self._scorer, opened.begun.requests[index], completion)
        opened.completions[index], opened.samples[index] = completion, sample
        if not opened.is_whole:
            return
        opened.born = self._version if opened.born is None else opened.born  # else none of it has a token
        whole = opened.whole()
        if whole.has_zero_variance and len(self._produced.replaced) < self._max_replaced:
            self._count(replaced=(whole,))
            self._replace(opened)
        self.news.set()

    async def _hold(self) -> Produced:
        self._fly(0)
        produced = replace(self._produced, elapsed_s=self._changed_at - self._taken_at)
        session, self._session = self._session, None
        if session is not None:
            await session.hold()
            while self._num_flying:  # what came back is taken before weights change
                await asyncio.sleep(0)
            await self._stack.aclose()
        for opened in self._open.values():
            if not opened.has_tokens and not opened.is_whole:
                opened.born = None
        return produced

    async def _state(self) -> ProducerState:
        groups = [
            OpenGroup(self._places.rank, opened.place, opened.born, opened.is_whole)
            for opened in self._open.values()
        ]
        return ProducerState(tuple(groups), self._places.next, tuple(self._places.again))

    async def _take(self, places: Iterable[int]) -> tuple[list[PromptGroup], Produced]:
        groups = [self._open.pop(place).whole() for place in places]
        self._fly(0)
        produced, self._produced = self._produced, Produced()
        self._taken_at = self._changed_at
        return groups, produced

    async def _end(self) -> None:
        self._is_ending = True
        try:
            await self._hold()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fly(self, change: int) -> None:
        """Count a request that is sent or answered, and the time since the last change."""
        now = time.monotonic()
        passed, self._changed_at = now - self._changed_at, now
        self._count(busy_s=passed * (self._num_flying > 0), request_s=passed * self._num_flying)
        self._num_flying += change

    def _count(self, **added: Any) -> None:
        self._produced = replace(
            self._produced, **{name: getattr(self._produced, name) + value for name, value in added.items()}
        )
