"""Rollouts in turn with training: over-sampling and dynamic sampling, with an engine that follows a script."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from megatron_dppo.config.rollout import SglangRollout
from megatron_dppo.data.batches.exchange import DataParallel
from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.data.prompts.shares import Part
from megatron_dppo.engines.base import EngineCounts, Request, SamplingParams, Session
from megatron_dppo.rewards import Reward, RewardResult
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scheduling import Scheduler, run_to_end
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.staleness import StalenessBound
from megatron_dppo.run.preemption import StopRequests
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.support.collecting import Collected, InBatches, ask_once
from tests.support.concurrent_engines import InSessions
from tests.support.ranks_on_threads import on_ranks
from tests.support.samples import InProcessScorer
from tests.unit.test_collect import TOKENIZER, complete

NUM_PROMPTS = 40
PROMPTS = [Prompt(str(i), "408", "test", text="<bos> 2 1 * 4 3 =") for i in range(NUM_PROMPTS)]
TOO_LONG = "<bos> 2 1 * 4 3 * 4 3 ="
WHOLE, HALF = "w3 # 1 0 0 0 <eos>", "w3 # 1"


class Halting(InSessions, Session):
    """Answers the requests of prompts that are not slow at once, and the last prompt's after them.

    The first response waits until all groups that are open on the rank are at the engine, as threads make them.
    Requests of slow prompts keep three tokens when they are held.
    """

    weight_version, counts = 7, EngineCounts()
    refusals: Mapping[str, int] = MappingProxyType({})
    is_rest_whole: Callable[[], bool]
    are_made: Callable[[], bool]

    def __init__(self, slow: Sequence[str] = (), last: str | None = None) -> None:
        self.slow, self.last = slow, last
        self.asked: list[Request] = []
        self.errors: dict[str, Any] = {}

    def __copy__(self) -> "Halting":
        return type(self)(self.slow, self.last)

    @contextlib.asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator["Halting"]:
        self.is_held = False
        yield self

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        self.asked.append(request)
        while not self.is_held and not self._answers(_prompt_of(request)):
            await asyncio.sleep(0)
        return complete(request, HALF, finish_reason="abort") if self.is_held else self.answer(request)

    def _answers(self, prompt: str) -> bool:
        return self.are_made() and prompt not in self.slow and (prompt != self.last or self.is_rest_whole())

    def answer(self, request: Request) -> Sample:
        return complete(request, WHOLE)

    async def hold(self) -> None:
        self.is_held = True


def _prompt_of(request: Request) -> str:
    assert request.prompt is not None
    return request.prompt.id


def _by_prompt(equal: Callable[[str], bool]) -> Reward:
    """Rewards that differ within a group, but for prompts that are `equal`."""
    scored = dict[str, int]()

    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        scored[prompt.id] = scored.get(prompt.id, 0) + 1
        same = [0.3, 0.1 + 0.2]  # up to rounding
        return RewardResult((same if equal(prompt.id) else [0.0, 1.0])[scored[prompt.id] % 2])

    return reward


class Run:
    """The ranks of a run that samples in turn with training."""

    def __init__(
        self,
        size: int = 1,
        engine: Halting | None = None,
        cursor: Any = None,
        prompts: Sequence[Prompt] = PROMPTS,
        equal: Callable[[str], bool] = lambda prompt: False,
        parts: Sequence[Part] = (),
        **options: Any,
    ) -> None:
        config = SglangRollout.model_validate({"prompts_per_rollout": 4, "samples_per_prompt": 2} | options)
        self.engines, self.num_rollouts = [copy(engine or Halting()) for _ in range(size)], 0
        maker = GroupMaker(TOKENIZER, config.samples_per_prompt, max_prompt_tokens=7, seed=0)
        scorer = Scorer(TOKENIZER, InProcessScorer(_by_prompt(equal)), False, None)
        params = SamplingParams(20)
        stream = PromptStream(prompts, 0, shuffle=False, cursor=cursor, parts=parts)
        bound = StalenessBound(config.prompts_per_rollout, 0, config.over_sampling)
        refills = config.max_refills if config.refill_zero_variance else 0
        self.ranks = list[Scheduler]()
        for rank, each in enumerate(self.engines):
            sampler = GroupSampler(each.session, ask_once, scorer, params)
            producer = Producer(
                *(maker, sampler, stream, (rank, size)), max_replaced=refills, in_rounds=bound.takes_all
            )
            each.is_rest_whole = partial(_are_whole, producer, [*each.slow, each.last])
            each.are_made = partial(_are_made, producer)
            self.ranks.append(Scheduler(bound, producer, 2))
        self.cursors: list[Any] = []

    @property
    def asked(self) -> list[Request]:
        """Requests of all ranks."""
        return [request for engine in self.engines for request in engine.asked]

    def next(self) -> list[Collected]:
        rollout, version = self.num_rollouts, self.engines[0].weight_version

        def run(data_parallel: DataParallel) -> Collected:
            peers = data_parallel.peers
            taken = self.ranks[peers.rank].next(rollout, version, peers.all_gather, run_to_end)
            assert taken is not None
            return Collected(*taken)

        batches = on_ranks(run, tuple(range(len(self.ranks))))
        self.cursors = [rank.cursor for rank in self.ranks]
        self.num_rollouts += 1
        return batches


def _are_whole(producer: Producer, late: Sequence[str | None]) -> bool:
    """Whether all open groups are whole, except for groups of late prompts."""
    turns = producer._open.values()  # pyright: ignore[reportPrivateUsage]
    groups = [turn.group for turn in turns]
    return all(group is not None and (group.is_whole or group.drawn.prompt.id in late) for group in groups)


def _are_made(producer: Producer) -> bool:
    """Whether all open groups are made; their requests begin in the same step of the loop."""
    turns = producer._open.values()  # pyright: ignore[reportPrivateUsage]
    return all(turn.group is not None for turn in turns)


def _ids(batches: Sequence[Collected]) -> list[str]:
    return [group.prompt.id for batch in batches for group in batch.groups]


def _places(batches: Sequence[Collected]) -> list[int]:
    return sorted(group.index for batch in batches for group in batch.groups)


def test_prompts_come_in_order_without_over_sampling_and_refills() -> None:
    run = Run(size=2)
    assert [_ids(run.next()), _ids(run.next())] == [["0", "2", "1", "3"], ["4", "6", "5", "7"]]
    assert run.cursors == [{"epoch": 0, "index": 8}] * 2


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_samples_from_each_file(size: int) -> None:
    run = Run(size, parts=[Part("low", 0, 20, 1.0), Part("high", 20, 20, 1.0)])
    rollouts = [run.next() for _ in range(10)]  # 40 prompts: both files once
    for rank in range(size):
        drawn = [int(prompt) for batches in rollouts for prompt in _ids([batches[rank]])]
        assert len(drawn) == 40 // size and 0.2 < sum(number < 20 for number in drawn) / len(drawn) < 0.8
    assert sorted(int(prompt) for batches in rollouts for prompt in _ids(batches)) == list(range(40))


def test_over_sampling_ends_with_the_groups_that_are_whole_first_and_drops_the_others() -> None:
    run = Run(engine=Halting(slow=("1", "5")), over_sampling=1.5)
    (batch,) = run.next()
    assert _ids([batch]) == ["0", "2", "3", "4"] and _places([batch]) == [0, 1, 2, 3]
    counts = batch.counts
    assert (counts.num_samples, counts.num_discarded_partials, counts.num_continued) == (8, 4, 0)
    assert counts.num_dropped_samples == 0
    assert run.cursors == [{"epoch": 0, "index": 6}]
    (batch,) = run.next()
    assert _ids([batch]) == ["6", "7", "8", "9"] and batch.counts.num_continued == 0
    assert not any(request.partial for request in run.asked)


def test_whole_groups_beyond_what_is_wanted_are_no_partials() -> None:
    class Late(Halting):
        async def ask(self, request: Request, params: SamplingParams) -> Sample:
            self.asked.append(request)
            return self.answer(request)  # all ended before they could be aborted

    run = Run(engine=Late(), over_sampling=1.5)
    (batch,) = run.next()
    assert _ids([batch]) == ["0", "1", "2", "3"] and batch.counts.num_discarded_partials == 0
    assert _ids(run.next()) == ["6", "7", "8", "9"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_draw_more_than_they_train_on_and_none_twice(size: int) -> None:
    run = Run(size, Halting(slow=[str(i) for i in range(1, NUM_PROMPTS, 3)]), over_sampling=1.5)
    seen = [prompt for _ in range(6) for prompt in _ids(run.next())]
    assert sorted(int(prompt) for prompt in seen) == [i for i in range(36) if i % 3 != 1]
    # A rank may still make a group that the rollout drops when the other ranks have enough.
    requests = Counter(int(request.id.split("/")[1]) for request in run.asked)
    assert set(requests.values()) == {2} and set(requests) <= set(range(36))
    assert run.cursors == [{"epoch": 0, "index": 36}] * size


def test_groups_without_variance_are_replaced_by_those_of_the_next_prompts() -> None:
    run = Run(equal=lambda prompt: prompt in "134", refill_zero_variance=True)
    (batch,) = run.next()
    assert _ids([batch]) == ["0", "6", "2", "5"]  # 4 and 5 came for 1 and 3, then 6 for 4
    assert [group.index for group in batch.groups] == [0, 1, 2, 3]
    assert batch.counts.num_replaced_groups == 3
    assert (batch.counts.num_samples, batch.counts.num_prompts) == (14, 7)
    assert run.cursors == [{"epoch": 0, "index": 7}]
    assert len({request.noise_key for request in run.asked}) == len(run.asked)


def test_refills_are_bounded_and_what_is_left_stays() -> None:
    run = Run(equal=lambda prompt: True, refill_zero_variance=True, max_refills=2)
    (batch,) = run.next()
    assert _ids([batch]) == ["8", "9", "10", "11"]
    assert batch.counts.num_replaced_groups == 8


@pytest.mark.parametrize("size", [2, 3])
def test_out_of_order_replacements_skip_no_prompt(size: int) -> None:
    run = Run(size, equal=lambda prompt: int(prompt) % 4 == 1, refill_zero_variance=True)
    seen = list[str]()
    for _ in range(5):
        seen += _ids(run.next())
        assert all(cursor == run.cursors[0] for cursor in run.cursors)
    asked = [int(request.id.split("/")[1]) for request in run.asked[::2]]
    assert len(seen) == 20 and len(asked) == len(set(asked))
    again = run.cursors[0].get("again", [])
    assert sorted([*asked, *again]) == list(range(run.cursors[0]["index"]))


@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_replaces_with_the_same_prompts(size: int) -> None:
    keywords: dict[str, Any] = {"equal": lambda prompt: int(prompt) % 4 == 1, "refill_zero_variance": True}
    run = Run(size, **keywords)
    run.next()
    resumed = Run(size, cursor=run.cursors[0], **keywords)
    assert _ids(run.next()) == _ids(resumed.next())
    assert run.cursors == resumed.cursors


def test_over_sampling_and_refills_together() -> None:
    run = Run(
        engine=Halting(slow=("1", "5")),
        over_sampling=1.5,
        equal=lambda prompt: prompt == "0",
        refill_zero_variance=True,
    )
    (batch,) = run.next()
    assert _ids([batch]) == ["6", "2", "3", "4"]  # a new prompt was faster than those that were open
    assert (batch.counts.num_replaced_groups, batch.counts.num_discarded_partials) == (1, 4)
    assert run.cursors == [{"epoch": 0, "index": 7}]


def test_over_sampled_partials_replace_a_group_of_the_same_rollout() -> None:
    run = Run(
        engine=Halting(slow=("5", "6"), last="1"),
        over_sampling=1.5,
        equal=lambda prompt: prompt == "0",
        refill_zero_variance=True,
    )
    (batch,) = run.next()
    assert _ids([batch]) == ["1", "2", "3", "4"]
    assert (batch.counts.num_replaced_groups, batch.counts.num_discarded_partials) == (1, 4)
    assert not any(request.partial for request in run.asked)


def test_the_next_prompts_replace_prompts_that_are_too_long() -> None:
    prompts = [Prompt(p.id, p.answer, p.source, text=TOO_LONG if p.id == "2" else p.text) for p in PROMPTS]
    run = Run(prompts=prompts, engine=Halting(slow=("1", "5")), over_sampling=1.5)
    (batch,) = run.next()
    assert _ids([batch]) == ["0", "6", "3", "4"]  # 6 has the turn of 2
    assert (batch.counts.num_prompts, batch.counts.num_prompts_too_long) == (5, 1)
    assert run.cursors == [{"epoch": 0, "index": 7}]
    assert _ids(run.next()) == ["7", "8", "9", "10"]


def test_groups_of_a_rollout_begin_together_in_the_turns_of_prompts_that_are_too_long() -> None:
    """The embedded engine samples all open conversations in one call, in the order in which they began."""
    batches = list[list[str]]()

    class Batches(InBatches, Halting):
        def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
            batches.append([request.id for request in requests[::2]])
            return [complete(request, WHOLE) for request in requests]

    prompts = [Prompt(p.id, p.answer, p.source, text=TOO_LONG if p.id in "145" else p.text) for p in PROMPTS]
    run = Run(1, Batches(), None, prompts, lambda prompt: prompt in "26", refill_zero_variance=True)
    (batch,) = run.next()
    assert _ids([batch]) == ["0", "7", "8", "3"]  # 4, 5 and then 6 had the turn of 1
    begun = ["0/0", "6/2", "2/4", "3/6"], ["7/8", "8/10"]
    assert batches == [[f"rollout0/{prompt}+0" for prompt in each] for each in begun]
    assert (batch.counts.num_prompts_too_long, batch.counts.num_replaced_groups) == (3, 2)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_stop_signal_interrupts_sampling_at_once(blocks: bool) -> None:
    class Endless(Halting):
        async def ask(self, request: Request, params: SamplingParams) -> Sample:
            if request.id == "rollout0/0/0+1":
                os.kill(os.getpid(), signal.SIGTERM)
                if blocks:
                    time.sleep(600)
            await asyncio.sleep(600)
            raise AssertionError("it is cancelled")

    run, started = Run(engine=Endless()), time.monotonic()
    (scheduler,) = run.ranks
    before = scheduler.cursor
    with StopRequests().handle_signals() as requests:
        assert scheduler.next(0, 7, lambda value: [value], requests.run_unless_asked) is None
    assert scheduler.cursor == before
    scheduler.close()
    assert time.monotonic() - started < 300


def test_old_tokens_moves_and_retractions_are_counted() -> None:
    class Moving(Halting):
        weight_version = 8

        def answer(self, request: Request) -> Sample:
            return complete(request, WHOLE, num_moves=1, num_retractions=2)

    (batch,) = Run(engine=Moving()).next()
    assert batch.counts.num_old_tokens == batch.counts.num_response_tokens == 8 * 7
    assert batch.counts.num_requeued == 8
    metrics = batch.counts.metrics()
    assert (metrics["rollout/old_token_fraction"], metrics["rollout/requeued_requests"]) == (1.0, 8.0)
    assert metrics["rollout/retractions"] == 16.0
