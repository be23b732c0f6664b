"""Samples the turns of many conversations together, with an engine that samples in batches."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from megatron_dppo.engines.base import Completion, Request, RolloutEngine, SamplingParams
from megatron_dppo.rollout.conversations import Ask


@dataclass(frozen=True)
class _Waiting:
    """A turn that waits to be sampled."""

    request: Request
    params: SamplingParams
    answer: asyncio.Future[Completion]


class BatchedTurns:
    """Samples one turn of all open conversations in one call of the engine, once each of them waits for a turn.

    Conversations begin together. The requests of a call are in the order in which the conversations began,
    however long environments take. Rounding can make an engine's samples depend on the order of a batch.
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
            RolloutError: The engine raised it; every conversation that waits for a response raises it too.
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
        """Sample after every conversation that is ready has run, so that their requests share a call."""
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
