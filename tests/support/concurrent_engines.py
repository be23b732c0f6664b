"""Engines with sessions: each response is requested, and returns, separately.

`SteppedEngine` samples one token at a time, however long that takes: pushes interrupt its responses on a busy
machine, too.
"""

import asyncio
import contextlib
import dataclasses
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    Session,
    give_up,
    join_parts,
    num_tokens_before,
    response_alone,
)
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.errors import RolloutError
from megatron_dppo.types import FinishReason, Sample, WeightVersionSpan


class InSessions:
    """Base of an engine that is used through sessions only."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        raise AssertionError("responses are asked for one by one")

    def load_weights(self, weights: Iterable[Any], version: int) -> str:
        raise AssertionError("tests set the version")


class OneByOne(InSessions, Session):
    """Samples one response at a time by the embedded engine; implements `engines.base.RolloutEngine`.

    Attributes:
        asked: Ids of the requests, in the order in which they were asked.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.counts, self.weight_version = engine, engine.counts, engine.weight_version
        self.asked: list[str] = []
        self.is_held = False
        self.errors: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator["OneByOne"]:
        self.is_held = False
        yield self

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        self.asked.append(request.id)
        await asyncio.sleep(0)
        return give_up(request) if self.is_held else self.engine.generate([request], params)[0]

    async def hold(self) -> None:
        self.is_held = True


@dataclass
class Weights:
    """What the servers hold, which all ranks sample by."""

    version: int = -1


@dataclass(frozen=True)
class Delays:
    """Delays drawn for each call, uniformly from 0 to twice the mean, in seconds.

    A session that has sampled `most_tokens` waits for a hold.
    """

    token_s: float = 0.002
    hold_s: float = 0.0  # from the last response until a hold returns
    most_tokens: float = math.inf

    def length_of(self, request_id: str, longest: int) -> int:
        """Tokens of a response."""
        return random.Random(request_id).randint(1, longest)


class SteppedSession(Session):
    """Samples tokens that name the weights they are of, one after the other, until it is held.

    Attributes:
        asked: Ids of the requests, in the order in which they were asked.
        num_tokens: Tokens sampled so far.
    """

    def __init__(self, engine: "SteppedEngine") -> None:
        self._engine, self.version = engine, engine.weight_version
        self.errors: Mapping[str, RolloutError] = {}
        self.is_held, self.num_flying, self.num_tokens = False, 0, 0
        self.asked = list[str]()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        if self.is_held:
            return give_up(request)
        if self._engine.fails(request.id):
            raise RolloutError(f"{request.id}: as the test wants it")
        self.asked.append(request.id)
        self.num_flying += 1
        delays, num_old = self._engine.delays, num_tokens_before(request)
        num_left = delays.length_of(request.id, params.max_response_tokens) - num_old
        said = list[int]()
        try:
            while len(said) < num_left and not self.is_held:
                await self._engine.sleep(delays.token_s)
                if not self.is_held and self.num_tokens < delays.most_tokens:
                    said.append(self._engine.weight_version + 1)  # of the weights that are there now
                    self.num_tokens += 1
        finally:
            self.num_flying -= 1
        reason: FinishReason = "stop" if len(said) == num_left else "abort"
        spans = (WeightVersionSpan(0, len(said), self.version),) if said else ()
        tokens = torch.tensor(said, dtype=torch.int64)
        rest = response_alone(request.id, tokens, -tokens.float(), reason, None, None, spans)
        return rest if request.partial is None else join_parts(request.partial, rest)

    async def hold(self) -> None:
        self.is_held = True
        await self._engine.sleep(self._engine.delays.hold_s)
        while self.num_flying:
            await asyncio.sleep(0)


class SteppedEngine(InSessions):
    """Opens sessions that sample token by token; implements `engines.base.RolloutEngine`.

    Attributes:
        weights: What all engines of a run sample by.
        sessions: All that were opened.
        num_open: Those that were not left.
    """

    counts = EngineCounts()
    refusals: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        seed: int = 0,
        fails: Callable[[str], bool] = lambda rid: False,
        weights: Weights | None = None,
        delays: Delays = Delays(),
    ) -> None:
        self.weights, self.delays, self.fails = weights or Weights(), delays, fails
        self._chance = random.Random(seed)
        self.num_open, self.sessions = 0, list[SteppedSession]()

    @property
    def weight_version(self) -> int:
        return self.weights.version

    @contextlib.asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator[SteppedSession]:
        self.num_open += 1
        self.sessions.append(SteppedSession(self))
        yield self.sessions[-1]
        self.num_open -= 1

    async def sleep(self, mean_s: float) -> None:
        await asyncio.sleep(2 * mean_s * self._chance.random())


def interrupted(completion: Sample) -> Sample:
    """What is there of a response when a hold comes before its end."""
    return dataclasses.replace(completion, finish_reason="abort")
