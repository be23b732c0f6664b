"""Samples and scores the responses of groups. Every response is a separate task of one event loop.

A response waits until sampling is on, and sends its request. If a hold interrupts it, it keeps its tokens, and
requests the rest once sampling resumes, possibly from other weights. It is scored as soon as it ends.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron_dppo.engines.base import (
    Ask,
    Request,
    SamplingParams,
    Session,
    input_tokens,
    num_tokens_before,
    resume_request,
    with_prompt,
)
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.groups import PromptGroup
from megatron_dppo.rollout.scoring import Fault, Scorer
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import Sample

logger = logging.getLogger(__name__)
PROGRESS_S = 30.0
"""Seconds between two log lines on responses that take longer."""

OpenSession = Callable[..., AbstractAsyncContextManager[Session]]
"""Opens a session; see `RolloutEngine.session`."""

Converse = Callable[[Request, SamplingParams, Ask], Awaitable[Sample]]
"""Samples one trajectory with a function that samples its turns; see `Conversations.run`."""


@dataclass
class Produced:
    """Counts and times of one rank's sampling since the last rollout was taken."""

    num_too_long: int = 0
    replaced: tuple[PromptGroup, ...] = ()  # groups with equal rewards
    num_interrupted: int = 0  # responses that a push interrupted
    num_prefilled_again: int = 0  # prompt tokens that servers computed again for their requests
    elapsed_s: float = 0.0  # seconds since the rollout was taken
    busy_s: float = 0.0  # seconds of them with at least one request in flight
    request_s: float = 0.0  # seconds in flight, summed over requests


@dataclass(eq=False)
class GroupSampler:
    """Samples between `go_on` and `hold`, in one event loop until `aclose`.

    Attributes:
        version: Version of the weights that sample.
        fault: Error that ended a task, or None.
    """

    open_session: OpenSession
    converse: Converse
    scorer: Scorer
    params: SamplingParams  # of every response
    most_open: int | None = None  # conversations at once; None: all
    version: int = field(default=-1, init=False)
    fault: BaseException | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._places = nullcontext() if self.most_open is None else asyncio.Semaphore(self.most_open)
        self._session: Session | None = None
        self._stack = AsyncExitStack()
        self._tasks = set[asyncio.Task[None]]()
        self._held_up: list[tuple[int, asyncio.Future[None]]] = []  # waiting responses, by prompt
        self._asked, self._answered = set[str](), set[str]()  # ids of the session's requests; those with tokens
        self._has_changed = asyncio.Event()
        self._produced, self._num_flying, self._num_begun, self._num_ended = Produced(), 0, 0, 0
        self._changed_at = self._taken_at = self._began_at = self._logged_at = time.monotonic()

    def sample(self, groups: Sequence[PromptGroup]) -> None:
        """Sample and score all responses of groups, in a new event loop."""

        async def work() -> None:
            async with aclosing(self):
                await self.go_on(version=0, may_be_held=False)
                for group in groups:
                    self.begin(group)
                await self.wait(lambda: not self._tasks)
                self.require_answers()
                await self.hold()

        run_loop(work())

    async def go_on(self, version: int, *, may_be_held: bool = True) -> None:
        """Start or resume sampling with the engine's weights, of this version.

        Responses continue in prompt order, because servers with a queue keep it. Otherwise requests
        that were queued at servers would overtake the interrupted ones at every push, and younger responses
        would delay long ones.
        """
        assert self._session is None, "sampling is on hold before `go_on`"
        session = await self._stack.enter_async_context(self.open_session(may_be_held=may_be_held))
        self._session, self.version = session, version
        self._asked, self._answered = set[str](), set[str]()
        self._num_begun, self._num_ended = self._num_begun - self._num_ended, 0
        self._began_at = self._logged_at = time.monotonic()
        held_up, self._held_up = self._held_up, []
        for _, gate in sorted(held_up, key=lambda each: each[0]):
            if not gate.done():
                gate.set_result(None)

    async def hold(self) -> None:
        """Stop sampling until `go_on`. Wait until no request is in flight; sampled tokens are kept."""
        session, self._session = self._session, None
        if session is not None:
            if self._num_flying:
                await session.hold()
            while self._num_flying:  # until every task has its completion, before the weights change
                await asyncio.sleep(0)
            await self._stack.aclose()

    async def wait(self, is_enough: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait until it is enough, at most `limit_s` seconds; log progress every 30 s."""
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        while self.fault is None and not is_enough() and (now := time.monotonic()) < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(end, self._logged_at + PROGRESS_S) - now):
                    while self.fault is None and not is_enough():
                        self._has_changed.clear()
                        await self._has_changed.wait()
            if (now := time.monotonic()) - self._logged_at >= PROGRESS_S:
                self._logged_at, counts = now, (self._num_ended, self._num_begun)
                logger.info("responses of this rank: %d of %d after %.0f s", *counts, now - self._began_at)
        if self.fault is not None:
            raise self.fault

    def require_answers(self) -> None:
        """Raise if no request since `go_on` has a response, because of the servers."""
        assert self._session is not None, "sampling is on"
        lost = [error for error in self._session.errors.values() if isinstance(error, ServerError)]
        if lost and len(lost) == len(self._asked) and not self._answered:
            raise lost[0]

    def begin(self, group: PromptGroup, on_whole: Callable[[PromptGroup], None] = lambda group: None) -> None:
        """Start a task for each response of a group; `on_whole` is called once all are scored."""
        self._num_begun += len(group.requests)
        for index in range(len(group.requests)):
            self.start(self._respond(group, index, on_whole))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task; an error that it raises becomes the `fault`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    async def aclose(self) -> None:
        """Cancel all tasks and requests; unfinished responses are lost."""
        for task in self._tasks:
            task.remove_done_callback(self._end_task)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._held_up.clear()
        self._session, self._num_begun, self._num_ended = None, 0, 0
        await self._stack.aclose()

    def count(self, **added: Any) -> None:
        """Add to counts of `Produced`."""
        for name, value in added.items():
            setattr(self._produced, name, getattr(self._produced, name) + value)

    def counts(self, *, starts_again: bool) -> Produced:
        """Return the counts and times so far, and start again from zero if asked to."""
        self._count_in_flight(0)
        produced = replace(self._produced, elapsed_s=self._changed_at - self._taken_at)
        if starts_again:
            self._produced, self._taken_at = Produced(), self._changed_at
        return produced

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._has_changed.set()
        if task.cancelled():
            error = RolloutError("sampling: found a cancelled response; expected it to end")
        else:
            error = task.exception()
        self.fault = self.fault or error

    async def _on_session(self, place: int) -> Session:
        """Wait until sampling is on, and return its session."""
        while self._session is None:
            gate = asyncio.get_running_loop().create_future()
            self._held_up.append((place, gate))
            await gate
        return self._session

    async def _respond(self, group: PromptGroup, index: int, on_whole: Callable[[PromptGroup], None]) -> None:
        """Sample one response, unless it was given up before, and score it, or the group if it is the last."""
        request, sample = group.requests[index], group.responses[index]
        assert request.prompt is not None, "requests of groups name their prompts"
        if sample is None:
            async with self._places:  # before the conversation is announced: engines wait for announced ones
                with (await self._on_session(group.drawn.place)).conversation(request.id):
                    found = await self.converse(request, self.params, partial(self._ask, group))
            for each in (found, *found.branches):
                _check(request, each, self.params)
            sample = group.responses[index] = with_prompt(found, request)
        self._num_ended += 1
        if self.scorer.scores_groups:
            if not group.is_sampled or group.is_being_scored:
                return
            group.is_being_scored = True
            answers = [(each, each.episode) for each in group.sampled]
            for number, scored in enumerate(await self.scorer.score_group(request.prompt, answers)):
                self._keep(group, number, scored)
        else:
            assert isinstance(sample, Sample), "a response is scored once"
            self._keep(group, index, await self.scorer.score(request.prompt, sample, sample.episode))
        if group.is_whole:
            on_whole(group)

    def _keep(self, group: PromptGroup, index: int, scored: Sample | Fault) -> None:
        """Keep a scored response; sound further samples of an agent's episode get the first one's reward."""
        branches = list[Sample]()
        if isinstance(scored, Sample) and scored.branches:
            branches = self.scorer.like(scored, scored.branches)
        group.keep(index, scored, branches)

    async def _ask(self, group: PromptGroup, request: Request, params: SamplingParams) -> Sample:
        """Sample one turn; a hold interrupts it and it resumes."""
        is_continued = False
        while True:
            session = await self._on_session(group.drawn.place)
            before = request.partial
            group.born = self.version if group.born is None else group.born
            self._asked.add(request.id)
            self._count_in_flight(+1)
            try:
                completion = await session.ask(request, params)
            finally:
                self._count_in_flight(-1)
            num_new = completion.tokens.numel() - num_tokens_before(request)
            group.has_tokens |= num_new > 0
            if num_new:
                self._answered.add(request.id)
            if is_continued and num_new:
                cached = completion.num_cached_tokens - (before.num_cached_tokens if before is not None else 0)
                self.count(num_prefilled_again=len(input_tokens(request)) - cached)
            is_interrupted = session.is_held and request.id not in session.errors
            if completion.finish_reason != "abort" or not is_interrupted:
                return completion
            self.count(num_interrupted=num_new > 0)
            is_continued |= num_new > 0
            rest = resume_request(request, completion, params)
            if rest is None:  # interrupted just after its last token
                return replace(completion, finish_reason="length")
            if num_new:
                group.interrupted.add(request.id)
            request, params = rest

    def _count_in_flight(self, change: int) -> None:
        """Count a request that starts (+1) or ends (-1), and the time since the last change."""
        now = time.monotonic()
        passed, self._changed_at = now - self._changed_at, now
        self._produced.busy_s += passed * (self._num_flying > 0)
        self._produced.request_s += passed * self._num_flying
        self._num_flying += change


def _check(request: Request, completion: Sample, params: SamplingParams) -> None:
    """Raise unless a completion fits the request, with one log-prob per token."""
    if completion.id != request.id:
        raise RolloutError(
            f"engine's completions: found {completion.id!r} in place of {request.id!r}; expected one "
            "for each request, in order. This is a fault of the engine: report it."
        )
    if wrong := completion.wrong_rows(has_topk=params.num_topk_log_probs > 0):
        raise RolloutError(
            f"completion {completion.id}: found rows {wrong}; expected {completion.tokens.numel()}, one per "
            "token. This is a fault of the engine: report it."
        )
