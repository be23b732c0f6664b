"""Samples one rank's open groups in a separate thread, while the trainer trains and pushes weights.

Every response is a separate task. It waits until sampling is on, and sends its request. If a push interrupts
it, it keeps its tokens and requests the rest from the new weights. So a response ends as soon as it can, is
scored at once, and is never dropped by a push. The trainer's thread limits the number of open groups. The
producers of different ranks never communicate.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.base import (
    Completion,
    Request,
    SamplingParams,
    Session,
    input_tokens,
    num_tokens_before,
    resume_request,
)
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.groups import GroupMaker, GroupSampler, PromptGroup
from megatron_dppo.rollout.staleness import OpenGroup, Places, ProducerState


@dataclass(frozen=True)
class Produced:
    """Counts and times of one rank's sampling since the last rollout was taken."""

    num_too_long: int = 0
    replaced: tuple[PromptGroup, ...] = ()  # groups with equal rewards
    num_interrupted: int = 0  # responses that a push interrupted
    num_prefilled_again: int = 0  # prompt tokens of their requests that servers computed again
    elapsed_s: float = 0.0  # seconds since the rollout was taken
    busy_s: float = 0.0  # seconds of them with at least one request in flight
    request_s: float = 0.0  # seconds in flight, summed over requests


class Producer:
    """Keeps one rank's groups open, and samples them between `go_on` and `hold`.

    All methods run in the producer's thread. An error there is kept as `fault`, and the trainer's thread raises
    it. Every wait has a limit: rollout.sglang.request_timeout_s for a request at each server, the time-outs of
    [data] for a reward or an environment, and the session's limit for a hold. The wait for a rollout also ends,
    with a fault, if all prompts are too long, or if a task was cancelled.

    Attributes:
        fault: Error that ended the producer's work, or None.
        news: Set when a group becomes whole, or when sampling fails.
    """

    def __init__(
        self,
        maker: GroupMaker,
        sampler: GroupSampler,
        stream: PromptStream,
        share: tuple[int, int],
        *,
        num_threads: int = 1,
        max_replaced: int = 0,
    ) -> None:
        """Begin no group before `begin_groups`, and sample none before `go_on`.

        Args:
            maker: Group maker.
            sampler: Sampler with an engine that can abort responses.
            stream: Stream of prompts.
            share: (rank, size) of the job.
            num_threads: Number of environments that may be reset at once.
            max_replaced: Largest number of groups with equal rewards that are replaced per rollout.
        """
        self._maker, self._sampler, self._stream = maker, sampler, stream
        self._places, self._max_replaced = Places(*stream.upcoming, share), max_replaced
        self._num_too_long_in_a_row = 0
        self._open: dict[int, PromptGroup | None] = {}  # by place; None until its prompt is ready
        self._produced, self._num_flying, self._changed_at = Produced(), 0, time.monotonic()
        self._taken_at = self._changed_at
        self.fault: BaseException | None = None
        self._session: Session | None = None
        self._version = -1
        self._stack = AsyncExitStack()
        self._tasks = set[asyncio.Task[None]]()
        self._is_ending = False
        self._threads = ThreadPoolExecutor(max(num_threads, 1), thread_name_prefix="environment")
        self.news = threading.Event()
        self._held_up: list[tuple[int, asyncio.Future[None]]] = []  # waiting requests, by prompt

    async def go_on(self, version: int, limit: int) -> None:
        """Start or resume sampling with the servers' weights, with up to `limit` open groups.

        Args:
            version: Version of these weights.
            limit: Number of groups that may be open on this rank.

        Raises:
            ServerError: No server responds and has the weights.
        """
        assert self._session is None, "sampling is on hold before `go_on`"
        self._session = await self._stack.enter_async_context(self._sampler.open_session())
        self._version = version
        self._release()
        await self.begin_groups(limit)

    def _release(self) -> None:
        """Let waiting requests continue, oldest groups first, because servers with a queue keep this order.

        Otherwise requests that were queued at servers would overtake the interrupted ones at every push, and
        younger responses would delay long ones.
        """
        held_up, self._held_up = self._held_up, []
        for _, gate in sorted(held_up, key=lambda each: each[0]):
            if not gate.done():
                gate.set_result(None)

    async def _open_session(self, place: int) -> Session:
        """Wait until sampling is on, and return its session."""
        while self._session is None:
            gate = asyncio.get_running_loop().create_future()
            self._held_up.append((place, gate))
            await gate
        return self._session

    async def begin_groups(self, limit: int) -> None:
        """Begin groups until `limit` are open."""
        while len(self._open) < limit:
            self._begin_next()

    def _begin_next(self) -> None:
        place = self._places.take()
        self._open[place] = None
        self._start(self._begin(place))

    def _replace(self, place: int) -> None:
        """Replace a group by the next one in one step, so that the number of open groups does not change."""
        del self._open[place]
        self._begin_next()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
        elif self._is_ending:
            error = None
        else:
            error = RolloutError("thread that samples ahead: found a cancelled response; expected it to end")
        if error is not None:
            self.fault = self.fault or error
            self.news.set()

    async def _begin(self, place: int) -> None:
        """Make a group and start its responses; if its prompt is too long, replace it by the next group."""
        groups = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._maker.begin(None, [(place, self._stream.at(place))])
        )
        if not groups:
            self._count(num_too_long=1)
            self._num_too_long_in_a_row += 1
            self._refuse_if_all_too_long()
            self._replace(place)
            return
        (group,) = groups
        self._num_too_long_in_a_row, self._open[place] = 0, group
        for index, completion in enumerate(group.completions):
            if completion is None:
                self._start(self._respond(group, index))
            else:  # the environment's `reset` failed
                await self._keep(group, index, completion)

    def _refuse_if_all_too_long(self) -> None:
        if self._num_too_long_in_a_row >= self._stream.num_prompts:
            raise RolloutError(
                f"rollout: found {self._num_too_long_in_a_row} prompts in a row longer than "
                f"data.max_prompt_tokens, out of {self._stream.num_prompts} prompts; expected some to sample "
                "from. Raise the limit, or shorten the prompts or the text that environments add."
            )

    async def _respond(self, group: PromptGroup, index: int) -> None:
        """Sample one response, with one or more weight versions, and score it."""
        completion = await self._sampler.respond(group, index, partial(self._ask, group))
        await self._keep(group, index, completion)

    async def _ask(self, group: PromptGroup, request: Request, params: SamplingParams) -> Completion:
        """Sample one turn; a push interrupts it and it resumes."""
        is_continued = False
        while True:
            session = await self._open_session(group.drawn.place)
            before, version = request.partial, self._version
            group.born = version if group.born is None else group.born
            self._fly(+1)
            try:
                completion = await session.ask(request, params)
            finally:
                self._fly(-1)
            num_new = completion.tokens.numel() - num_tokens_before(request)
            group.has_tokens |= num_new > 0
            if is_continued and num_new:
                cached = completion.num_cached_tokens - (before.num_cached_tokens if before is not None else 0)
                self._count(num_prefilled_again=len(input_tokens(request)) - cached)
            is_interrupted = session.is_held and request.id not in session.errors
            if completion.finish_reason != "abort" or not is_interrupted:
                return completion
            self._count(num_interrupted=num_new > 0)
            is_continued |= num_new > 0
            rest = resume_request(request, completion, params)
            if rest is None:  # interrupted just after its last token
                return replace(completion, finish_reason="length")
            request, params = rest

    async def _keep(self, group: PromptGroup, index: int, completion: Completion) -> None:
        """Score a response. If its group is whole then and all rewards are equal, replace the group."""
        await self._sampler.keep(group, index, completion)
        if not group.is_whole:
            return
        group.born = self._version if group.born is None else group.born  # None only if it has no token
        if group.has_zero_variance and len(self._produced.replaced) < self._max_replaced:
            self._count(replaced=(group,))
            self._replace(group.drawn.place)
        self.news.set()

    async def hold(self) -> Produced:
        """Stop sampling until `go_on`. Wait until no request is at a server; sampled tokens are kept.

        Returns:
            Counts and times between the last `take` and this call.
        """
        self._fly(0)
        produced = replace(self._produced, elapsed_s=self._changed_at - self._taken_at)
        session, self._session = self._session, None
        if session is not None:
            await session.hold()
            while self._num_flying:  # until every task has its completion, before the weights change
                await asyncio.sleep(0)
            await self._stack.aclose()
        for group in self._open.values():
            if group is not None and not group.has_tokens and not group.is_whole:
                group.born = None
        return produced

    async def state(self) -> ProducerState:
        """Return the open groups, and the indices of the next prompts."""
        groups = [
            OpenGroup(self._places.rank, place, group and group.born, group is not None and group.is_whole)
            for place, group in self._open.items()
        ]
        return self._places.state(groups)

    async def take(self, places: Iterable[int]) -> tuple[list[PromptGroup], Produced]:
        """Remove and return the whole groups of `places`, in order, with the counts since the last call."""
        groups = [group for place in places if (group := self._open.pop(place)) is not None]
        self._fly(0)
        produced, self._produced = self._produced, Produced()
        self._taken_at = self._changed_at
        return groups, produced

    async def end(self) -> None:
        """Abort requests at servers, and end all tasks; open groups are lost."""
        self._is_ending = True
        try:
            await self.hold()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _fly(self, change: int) -> None:
        """Count a request that starts (+1) or ends (-1), and the time since the last change."""
        now = time.monotonic()
        passed, self._changed_at = now - self._changed_at, now
        self._count(busy_s=passed * (self._num_flying > 0), request_s=passed * self._num_flying)
        self._num_flying += change

    def _count(self, **added: Any) -> None:
        self._produced = replace(
            self._produced, **{name: getattr(self._produced, name) + value for name, value in added.items()}
        )
