"""A session of an engine that samples in batches: one call samples a turn of all open conversations."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from megatron_dppo.engines.base import (
    Request,
    SamplingParams,
    Session,
    give_up,
)
from megatron_dppo.errors import RolloutError
from megatron_dppo.types import Sample

Generate = Callable[[Sequence[Request], SamplingParams], Sequence[Sample]]
"""Returns a completion for each request, in order; blocks until all of them have ended."""


@dataclass(frozen=True)
class _Waiting:
    """A request that waits to be sampled."""

    request: Request
    params: SamplingParams
    answer: asyncio.Future[Sample]


class BatchSession(Session):
    """Samples in one call of `generate` once each open conversation waits for a response.

    Conversations begin together. The requests of a call are in the order in which the conversations began,
    however long environments take. Rounding can make an engine's samples depend on the order of a batch.
    """

    def __init__(self, generate: Generate) -> None:
        """Store the function that samples."""
        self._generate = generate
        self._open = dict[str, None]()  # ids of the open conversations, in the order in which they began
        self._waiting = dict[str, _Waiting]()
        self._is_due = self.is_held = False
        self.errors = dict[str, RolloutError]()

    @contextmanager
    def conversation(self, request_id: str) -> Generator[None]:
        """See `Session.conversation`."""
        self._open[request_id] = None
        try:
            yield
        finally:
            self._open.pop(request_id, None)
            self._sample_soon()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        """See `Session.ask`; every request of a batch raises the error of the batch."""
        if self.is_held:
            return give_up(request)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = _Waiting(request, params, answer)
        self._sample_soon()
        try:
            return await answer
        finally:
            self._waiting.pop(request.id, None)

    async def hold(self) -> None:
        """See `Session.hold`; a call of `generate` is never interrupted."""
        self.is_held = True
        for each in self._waiting.values():
            if not each.answer.done():
                each.answer.set_result(give_up(each.request))

    def _sample_soon(self) -> None:
        """Sample after every conversation that is ready has run, so that their requests share a call."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._sample)

    def _sample(self) -> None:
        self._is_due = False
        if not self._waiting or self.is_held or not self._open.keys() <= self._waiting.keys():
            return
        waiting = [self._waiting[request_id] for request_id in self._open]
        waiting += [each for request_id, each in self._waiting.items() if request_id not in self._open]
        self._waiting.clear()
        try:
            for params in dict.fromkeys(each.params for each in waiting):
                batch = [each for each in waiting if each.params == params]
                completions = self._generate([each.request for each in batch], params)
                if len(completions) != len(batch):
                    raise RolloutError(
                        f"engine's completions: found {len(completions)} completions; expected one for each of "
                        f"{len(batch)} requests, in order. This is a fault of the engine: report it."
                    )
                for each, completion in zip(batch, completions, strict=True):
                    if not each.answer.done():  # cancelled in this turn of the loop
                        each.answer.set_result(completion)
        except BaseException as error:  # noqa: BLE001 - raised in the conversations
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)


@asynccontextmanager
async def batch_session(generate: Generate) -> AsyncGenerator[Session]:
    """Open a session that samples with a function."""
    yield BatchSession(generate)
