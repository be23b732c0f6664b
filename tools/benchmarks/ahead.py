"""Measures the speed-up from sampling ahead for long-tailed response lengths, with the real producer.

    python -m tools.benchmarks.ahead
    python -m tools.benchmarks.ahead --train-s 60 --rollouts 20

There is no server and no model. The fake server has a number of slots with a fixed time per token, and the fake
trainer sleeps. Response lengths are lognormal, up to 16384 tokens. All durations are shortened by --scale, so
Python's own time adds to them. Figures are in seconds before scaling. `Ahead` and `Producer` are the classes
that a run uses. A push interrupts requests, and their tokens are prefilled again before decoding continues.

Rollouts are synchronous (S = 0: sample, then train), or sampled ahead with rollout.max_staleness = S. "formula"
is the formula of `plan --split`: max(a / n, b) + p, or max(a / n, tail) + b + p if S = 0. It uses durations
measured in this run: a / n to sample a rollout's tokens with all slots, b to train, p to push and repeat the
prefill, and tail for the longest response. No S can be faster than the formula for long. An S that hides the
tail, with S times the formula at least as long as the tail ("hides"), comes close. "age" is the mean number of
versions between the sampling of a response's oldest token and training.
"""

import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.base import (
    Completion,
    Request,
    SamplingParams,
    Session,
    give_up,
    join_parts,
    num_tokens_before,
)
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.environments import InProcess, SingleTurn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rewards import RewardFault, RewardRequest, RewardResult
from megatron_dppo.rollout.ahead import Ahead
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.groups import GroupMaker, GroupSampler
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.staleness import Places, StalenessBound
from megatron_dppo.runtime.tables import show_table
from megatron_dppo.types import FinishReason, Prompt, WeightVersionSpan
from tools.benchmarks.benchmarking import OUT, ROOT, OtherPrograms, cli, machine, warn_if_busy, write_json

SETTINGS = ((0, 1.0), (1, 2.0), (2, 3.0), (3, 3.0), (4, 3.0))  # S, over_sampling
LONGEST = 16384
SKIPPED = 2  # warm-up rollouts, in addition to S, until ages are as in a long run


@dataclass(frozen=True)
class Pace:
    """Durations in seconds before scaling, and sizes."""

    train_s: float = 120.0
    push_s: float = 5.0
    token_s: float = 0.02  # seconds per token of a response, independent of the number of responses
    prefill_tokens_per_s: float = 10_000.0
    slots: int = 64
    prompts: int = 16
    samples: int = 8
    mean_log_length: float = 7.6
    scale: float = 0.0045

    def length_of(self, request_id: str) -> int:
        """Return the number of tokens of a response."""
        drawn = random.Random(request_id).lognormvariate(self.mean_log_length, 0.9)
        return max(1, min(LONGEST, int(drawn)))


class PacedSession(Session):
    """Session that decodes in slots, first come first served; implements `engines.base.Session`.

    Like `ServerSession`, a hold first returns the requests that wait for a slot, then the requests in slots.
    """

    def __init__(self, pace: Pace, version: int) -> None:
        self._pace, self._version = pace, version
        self.errors: Mapping[str, RolloutError] = {}
        self._hold: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = deque[asyncio.Future[bool]]()
        self._num_free, self._num_asked, self._prefill_until = pace.slots, 0, 0.0
        self.num_prefilled, self.slot_s = 0, 0.0

    @property
    def is_held(self) -> bool:
        """See `Session.is_held`."""
        return self._hold.done()

    async def ask(self, request: Request, params: SamplingParams) -> Completion:
        """See `Session.ask`."""
        self._num_asked += 1
        try:
            return await self._decode(request) if await self._take_slot() else give_up(request)
        finally:
            self._num_asked -= 1

    async def hold(self) -> None:
        """See `Session.hold`."""
        while self._waiting:
            self._waiting.popleft().set_result(False)
        self._hold.set_result(None)
        while self._num_asked:
            await asyncio.sleep(0)

    async def _take_slot(self) -> bool:
        """Wait for a slot. Return whether there was one before the hold."""
        if self.is_held:
            return False
        if self._num_free == 0:
            self._waiting.append(asyncio.get_running_loop().create_future())
            return await self._waiting[-1]
        self._num_free -= 1
        return True

    def _give_slot(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(True)
        else:
            self._num_free += 1

    async def _decode(self, request: Request) -> Completion:
        """Decode a response in a slot until it ends or is held, then free the slot."""
        pace, num_old, began = self._pace, num_tokens_before(request), time.perf_counter()
        self.num_prefilled += num_old
        seconds = num_old / pace.prefill_tokens_per_s * pace.scale
        self._prefill_until = max(began, self._prefill_until) + seconds
        await asyncio.sleep(0)  # concurrent requests are all prefilled before any of them is decoded
        while (rest_s := self._prefill_until - time.perf_counter()) > 0 and not self.is_held:
            await asyncio.wait({self._hold}, timeout=rest_s)
        started, num_left = time.perf_counter(), pace.length_of(request.id) - num_old
        token_s = pace.token_s * pace.scale
        await asyncio.wait({self._hold}, timeout=num_left * token_s)
        ended = time.perf_counter()
        num_new = num_left if not self.is_held else min(int((ended - started) / token_s), num_left)
        self.slot_s += (ended - began) / pace.scale
        self._give_slot()
        if num_new == 0:
            return give_up(request)
        reason: FinishReason = "stop" if num_new == num_left else "abort"
        spans, nothing = (WeightVersionSpan(0, num_new, self._version),), torch.zeros(num_new)
        rest = Completion(request.id, nothing.long(), nothing, reason, None, None, spans)
        return rest if request.partial is None else join_parts(request.partial, rest)


class PacedEngine:
    """Engine with the part of `engines.base.RolloutEngine` that a producer uses."""

    counts = EngineCounts()

    def __init__(self, pace: Pace) -> None:
        self._pace, self.weight_version = pace, -1
        self.num_prefilled, self.slot_s = 0, 0.0

    @asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator[PacedSession]:
        """See `RolloutEngine.session`."""
        session = PacedSession(self._pace, self.weight_version)
        yield session
        self.num_prefilled += session.num_prefilled
        self.slot_s += session.slot_s

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Raise: this benchmark does not call it."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Raise: this benchmark does not call it."""
        raise NotImplementedError


class NoWords:
    """Tokenizer for responses without text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return one token."""
        return [1]

    def apply_chat_template(self, conversation: Any, **_: Any) -> list[int]:
        """Raise: no prompt is a chat."""
        raise NotImplementedError

    def decode(self, token_ids: Any, **_: Any) -> str:
        """Return no text."""
        return ""


class ByChance:
    """Random rewards; implements `rollout.scoring.RewardScorer`."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """See `RewardPool.score`."""
        return [RewardResult(random.random()) for _ in requests]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """See `RewardPool.score_one`."""
        return RewardResult(random.random())


@dataclass(frozen=True)
class Figures:
    """Figures for one S. Durations are in seconds before scaling."""

    max_staleness: int
    over_sampling: float
    rollout_s: float
    formula_s: float
    waiting: float  # share of the time that the trainer waits for samples
    slots_busy: float
    mean_age: float
    max_age: int
    sampling_s: float  # a / n
    tail_s: float  # seconds of the longest response
    prefill_s: float  # seconds of repeated prefill per rollout

    @property
    def hides_tail(self) -> bool:
        """Whether S rollouts take at least as long as the longest response."""
        return self.max_staleness * self.formula_s >= self.tail_s


def main(
    rollouts: Annotated[int, typer.Option(min=2, help=f"Rollouts, after {SKIPPED} + S to warm up.")] = 8,
    train_s: Annotated[float, typer.Option(min=0.0, help="Seconds of training per rollout.")] = 120.0,
    push_s: Annotated[float, typer.Option(min=0.0, help="Seconds per push.")] = 5.0,
    scale: Annotated[float, typer.Option(min=1e-4, help="Real seconds per second of these.")] = Pace.scale,
    out: Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")] = OUT
    / "ahead.json",
) -> None:
    """Print seconds per rollout, compared with the formula."""
    pace, others = Pace(train_s=train_s, push_s=push_s, scale=scale), OtherPrograms()
    rows = [measure(pace, StalenessBound(pace.prompts, *setting), rollouts) for setting in SETTINGS]
    show_table(
        f"{pace.prompts} x {pace.samples} responses per rollout in {pace.slots} slots, training {train_s:g} s, "
        f"push {push_s:g} s",
        ("S", "over", "s/rollout", "speed-up", "formula", "hides", "ratio", "waiting", "busy", "age", "max"),
        [_cells(row, rows[0]) for row in rows],
    )
    warn_if_busy("the rollouts", others.cores())
    write_json(ROOT / out, {"machine": machine(), "pace": asdict(pace), "rows": [asdict(row) for row in rows]})


def _cells(row: Figures, first: Figures) -> tuple[str, ...]:
    return (
        *(f"{row.max_staleness}", f"{row.over_sampling:g}", f"{row.rollout_s:.0f}"),
        *(f"{first.rollout_s / row.rollout_s:.2f}", f"{row.formula_s:.0f}", "yes" if row.hides_tail else "no"),
        *(f"{row.rollout_s / row.formula_s:.2f}", f"{row.waiting:.2f}", f"{row.slots_busy:.2f}"),
        *(f"{row.mean_age:.2f}", f"{row.max_age}"),
    )


def measure(pace: Pace, bound: StalenessBound, num_rollouts: int) -> Figures:
    """Sample and "train" rollouts, after warm-up rollouts."""
    num_skipped = SKIPPED + bound.max_staleness
    engine = PacedEngine(pace)
    ahead = _ahead(pace, bound, engine)
    ages, waits, num_tokens, longest = list[int](), list[float](), 0, 0
    began, prefilled, slot_s = 0.0, 0, 0.0

    def push(version: int) -> None:
        with ahead.pause(version, num_left=num_skipped + num_rollouts + bound.max_staleness + 1 - version):
            time.sleep(pace.push_s * pace.scale)
            engine.weight_version = version

    try:
        push(0)
        for version in range(num_skipped + num_rollouts):
            if version == num_skipped:
                began, prefilled, slot_s = time.perf_counter(), engine.num_prefilled, engine.slot_s
            asked = time.perf_counter()
            taken = ahead.next(version, lambda value: [value], lambda: False)
            assert taken is not None, "nobody asks it to stop"
            if version >= num_skipped:
                waits.append(time.perf_counter() - asked)
                spans = [s.weight_versions for group in taken[0] for s in group.samples]
                ages += [version - each[0].version for each in spans]
                num_tokens += sum(each[-1].stop for each in spans)
                longest = max(longest, *(each[-1].stop for each in spans))
            time.sleep(pace.train_s * pace.scale)
            push(version + 1)
        wall_s = (time.perf_counter() - began) / pace.scale
        prefilled, slot_s = engine.num_prefilled - prefilled, engine.slot_s - slot_s
    finally:
        ahead.close()
    sampling_s = num_tokens * pace.token_s / pace.slots / num_rollouts
    prefill_s = prefilled / pace.prefill_tokens_per_s / num_rollouts
    tail_s = longest * pace.token_s
    at_once, in_turns = max(sampling_s, pace.train_s), max(sampling_s, tail_s) + pace.train_s
    return Figures(
        bound.max_staleness,
        bound.over_sampling,
        rollout_s=wall_s / num_rollouts,
        formula_s=(at_once if bound.max_staleness else in_turns) + pace.push_s + prefill_s,
        waiting=sum(waits) / pace.scale / wall_s,
        slots_busy=slot_s / pace.slots / wall_s,
        mean_age=statistics.fmean(ages),
        max_age=max(ages),
        sampling_s=sampling_s,
        tail_s=tail_s,
        prefill_s=prefill_s,
    )


def _ahead(pace: Pace, bound: StalenessBound, engine: PacedEngine) -> Ahead:
    stream = PromptStream([Prompt("0", "", "benchmark", text="?")], 0, shuffle=False)

    def producer(places: Places) -> Producer:
        conversations = Conversations(InProcess(SingleTurn), NoWords(), TurnLimits())
        maker = GroupMaker(NoWords(), pace.samples, max_prompt_tokens=1, seed=0)
        scorer = Scorer(NoWords(), ByChance(), False, None)
        sampler = GroupSampler(engine.session, conversations.run, scorer, SamplingParams(LONGEST))
        return Producer(maker, sampler, places, stream.at, num_prompts=stream.num_prompts)

    return Ahead(bound, producer, stream, (0, 1), smallest_group=1)


if __name__ == "__main__":
    cli(main, __doc__)
