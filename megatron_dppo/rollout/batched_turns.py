"""Samples the turns of many conversations together, with an engine that samples batches."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from megatron_dppo.engines.base import Completion, Request, RolloutEngine, SamplingParams
from megatron_dppo.rollout.conversations import Ask


@dataclass(frozen=True)
class _Waiting:
    """A turn that is to be sampled."""

    request: Request
    params: SamplingParams
    answer: asyncio.Future[Completion]


class BatchedTurns:
    """Samples a turn of all open conversations by one call of the engine, once each of them waits for one.

    Conversations begin together. Their requests stand in a call in the order in which they began, however long
    environments take: what such an engine samples may depend on that order through rounding.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._num_begun = 0
        self._open = set[int]()
        self._waiting = dict[int, _Waiting]()
        self._is_due = False

    async def run(self, conversation: Callable[[Ask], Awaitable[Completion]]) -> Completion:
        """Run a conversation, and return its trajectory.

        Raises:
            RolloutError: As the engine does, in every conversation that waits for a response.
        """
        number = self._num_begun
        self._num_begun += 1
        self._open.add(number)
        try:
            return await conversation(partial(self._ask, number))
        finally:
            self._open.discard(number)
            self._sample_soon()

    async def _ask(self, number: int, request: Request, params: SamplingParams) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(request, params, answer)
        self._sample_soon()
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _sample_soon(self) -> None:
        """Sample after the conversations that can go on now: those begun together wait when the first does."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._sample)

    def _sample(self) -> None:
        self._is_due = False
        if not self._waiting or self._waiting.keys() != self._open:
            return
        waiting = [self._waiting[number] for number in sorted(self._waiting)]
        self._waiting.clear()
        try:
            for params in dict.fromkeys(each.params for each in waiting):
                turns = [each for each in waiting if each.params == params]
                completions = self._engine.generate([each.request for each in turns], params)
                for each, completion in zip(turns, completions, strict=True):
                    each.answer.set_result(completion)
        except BaseException as error:  # noqa: BLE001 - raised in the conversations
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)
