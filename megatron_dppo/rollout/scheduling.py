"""Supplies rollouts, in turn with training or ahead of it.

Only the trainer's threads communicate, in `next`: all ranks gather their states, and apply the same pure rules
to them (`staleness`). So they agree on the prompts that come next, on the groups of a rollout, on stopping and
on failing, and no rank enters a collective alone.
"""

import math
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Any, Protocol, TypeVar

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.errors import RolloutError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_ages
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, usable_groups
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import GroupSampler, Produced
from megatron_dppo.rollout.staleness import (
    OpenGroup,
    Places,
    ProducerState,
    StalenessBound,
    upcoming_after,
)
from megatron_dppo.runtime.concurrency import LoopThread, run_loop
from megatron_dppo.types import DataCursor, SampleGroup

T = TypeVar("T")
Taken = tuple[list[SampleGroup], RolloutCounts]
"""One rank's share of a rollout: groups with rewards, and counts of everything that was sampled."""

_POLL_S = 0.2
_ANSWER_S = 120.0  # limit of a call of the producer that waits for no server
_HOLD_S = 900.0  # a session limits only the time between two replies, and hundreds of long ones are decoded
_CONNECT_S = 1800.0  # far above the sum of the client's limits for a connection


class AllGather(Protocol):
    """Gathers the values of all ranks of the job, as `runtime.process.Runtime.all_gather` does."""

    def __call__(self, value: T, /) -> list[T]:
        """Return every rank's value, in rank order."""
        ...


class RunUnlessAsked(Protocol):
    """Runs work unless this rank is asked to stop, as `run.preemption.StopRequests.run_unless_asked` does."""

    def __call__(self, work: Callable[[], T], /) -> T | None:
        """Return the result of `work`, or None if this rank is asked to stop before or meanwhile."""
        ...


def run_to_end(work: Callable[[], T]) -> T | None:
    """Run work that nobody asks to stop."""
    return work()


@dataclass(eq=False)
class InTurn:
    """Supplies one rank's share of each rollout; samples only in `next`, so that no group stays open.

    Each rank takes its share of a rollout's prompts. With over-sampling a rollout begins more groups than it
    needs, and ends once enough groups are whole. The others are dropped, and their prompts do not return in
    this epoch. A group with equal rewards is replaced by a group that over-sampling left, or by the group of a
    later prompt of this rank.
    """

    options: RolloutConfig
    maker: GroupMaker
    sampler: GroupSampler  # over-sampling requires an engine that can abort responses
    stream: PromptStream
    share: tuple[int, int]  # (rank, size) of the job
    smallest_group: int  # minimum number of sound samples of a group
    metrics: Metrics = field(default_factory=Metrics)  # stays empty; see `Ahead`

    def __post_init__(self) -> None:
        self._upcoming = self.stream.upcoming
        self._num_begun = math.ceil(self.options.over_sampling * self.options.prompts_per_rollout)  # all ranks

    @contextmanager
    def pause(self, version: int, num_left: int) -> Iterator[None]:
        """See `Rollouts.pause`; nothing is sampled between two rollouts."""
        yield

    def next(
        self, rollout: int, version: int, all_gather: AllGather, run_unless_asked: RunUnlessAsked
    ) -> Taken | None:
        """Sample this rank's share of the next rollout with the engine's weights; see `Rollouts.next`."""
        (next_place, again), (rank, size), num_begun = self._upcoming, self.share, self._num_begun
        own = Places(next_place, again, self.share)
        first = [(index, own.take()) for index in range(rank, num_begun, size)]
        later = Places(next_place + max(num_begun - len(again), 0), again[num_begun:], self.share)

        async def sample() -> Taken:
            async with aclosing(self.sampler):
                return await self._sample_rollout(rollout, version, first, later)

        taken = run_unless_asked(lambda: run_loop(sample()))
        states = all_gather(None if taken is None else later.state())
        if None in states:
            return None
        self._upcoming = upcoming_after([state for state in states if state is not None])
        return taken

    @property
    def cursor(self) -> DataCursor:
        """Cursor after the last rollout."""
        return self.stream.cursor_at(*self._upcoming)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each of several prompt files; see `PromptStream.epochs`."""
        return self.stream.epochs(self._upcoming[0])

    def close(self) -> None:
        """Do nothing, because no group is open."""

    async def _sample_rollout(
        self, rollout: int, version: int, first: Sequence[tuple[int, int]], later: Places
    ) -> Taken:
        """Sample groups of the prompts `first` (index, place); `later` ones replace groups of equal rewards."""
        options, (rank, size) = self.options, self.share
        groups = self._begin(rollout, first)
        num_too_long = len(first) - len(groups)
        num_wanted = max(len(range(rank, options.prompts_per_rollout, size)) - num_too_long, 0)
        scored, rest = await self.sampler.sample_until(groups, num_wanted, version)
        if options.over_sampling > 1:  # chance decides which groups are whole first, so they get new indices
            for number, group in enumerate(scored):
                group.index = rank + size * number
        replaced, indices = list[PromptGroup](), count(self._num_begun + rank, size)
        for _ in range(options.max_refills if options.refill_zero_variance else 0):
            equal = [at for at, group in enumerate(scored) if group.has_zero_variance]
            if not equal:
                break
            fresh = self._begin(rollout, [(next(indices), later.take()) for _ in equal])
            num_too_long += len(equal) - len(fresh)
            groups = [*rest, *fresh]
            whole, rest = await self.sampler.sample_until(groups, min(len(equal), len(groups)), version)
            for at, group in zip(equal, whole, strict=False):
                replaced.append(scored[at])
                group.index, scored[at] = scored[at].index, group
        return usable_groups(
            scored,
            replaced,
            self.smallest_group,
            num_too_long=num_too_long,
            weight_version=version,
            rest=rest,
        )

    def _begin(self, rollout: int, places: Sequence[tuple[int, int]]) -> list[PromptGroup]:
        return self.maker.begin(rollout, [(index, self.stream.at(place)) for index, place in places])


@dataclass(frozen=True)
class _Report:
    """State of one rank, gathered by all ranks while they wait for a rollout."""

    state: ProducerState
    is_asked_to_stop: bool
    fault: str | None


@dataclass(eq=False)
class Ahead:
    """Supplies one rank's share of each rollout, and samples the next ones while the trainer trains.

    Staleness is bounded. Every rank calls each method together. The methods raise a RolloutError if the
    producer's thread does not return within 120 s (900 s for a hold, 1800 s to resume).
    """

    bound: StalenessBound
    producer: Producer
    smallest_group: int  # minimum number of sound samples of a group
    metrics: Metrics = field(default_factory=Metrics)  # of the last `next` or `pause`, on this rank

    def __post_init__(self) -> None:
        self._thread, self._num_left = LoopThread("rollout producer"), 0
        upcoming, (_, size) = self.producer.stream.upcoming, self.producer.share
        self._states = [Places(*upcoming, (rank, size)).state() for rank in range(size)]

    @contextmanager
    def pause(self, version: int, num_left: int) -> Iterator[None]:
        """See `Rollouts.pause`; the first call starts the thread."""
        if self._thread.has_started:
            if self.producer.fault is not None:
                raise self.producer.fault
            started = perf_counter()
            produced = self._call(self.producer.hold(), _HOLD_S)
            self._measure_hold(produced, started)
        yield
        self._num_left = num_left
        if num_left:
            self._call(self.producer.go_on(version, self._own_limit(is_training=False)), _CONNECT_S)

    def next(
        self, rollout: int, version: int, all_gather: AllGather, run_unless_asked: RunUnlessAsked
    ) -> Taken | None:
        """Wait for the groups that these weights train on, and return this rank's share; see `Rollouts.next`.

        Raises:
            RolloutError: A producer failed, no open group can end the wait, or a sample is older than the bound
                allows.
        """
        while True:
            self.producer.news.clear()
            fault = self.producer.fault  # read once, so that all ranks see the same fault in this round
            is_asked_to_stop = run_unless_asked(lambda: True) is None
            state = self._call(self.producer.state())
            reports = all_gather(_Report(state, is_asked_to_stop, _describe(fault)))
            if any(each.is_asked_to_stop for each in reports):
                return None
            if fault is not None:
                raise fault
            for rank, each in enumerate(reports):
                if each.fault is not None:
                    raise RolloutError(f"rank {rank}: {each.fault}")
            groups = [group for each in reports for group in each.state.groups]
            chosen = self.bound.choose(groups, version)
            if chosen is not None:
                break
            _refuse_endless_wait(groups, rollout)
            self.producer.news.wait(_POLL_S)
        self._states = [each.state for each in reports]
        return self._take(chosen, groups, version)

    @property
    def cursor(self) -> DataCursor:
        """Cursor after the last rollout; it repeats the prompts of open groups first."""
        return self.producer.stream.cursor_at(*upcoming_after(self._states))

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each of several prompt files; see `PromptStream.epochs`."""
        return self.producer.stream.epochs(upcoming_after(self._states)[0])

    def close(self) -> None:
        """Abort requests at servers, and end the thread; open groups are lost."""
        if self._thread.has_started:
            try:
                self._call(self.producer.end(), _HOLD_S)
            finally:
                self._thread.close(_ANSWER_S)

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine of the producer in its thread, and return its result.

        Raises:
            RolloutError: It takes longer than `timeout_s` (None means `_ANSWER_S`).
        """
        timeout_s, name = _ANSWER_S if timeout_s is None else timeout_s, work.__name__
        try:
            return self._thread.call(work, timeout_s)
        except TimeoutError:
            raise RolloutError(
                f"thread that samples ahead: found no reply to {name!r} within {timeout_s:g} s; expected one. "
                f"Look at the stack of process {os.getpid()} (py-spy dump). Start the run again: it resumes."
            ) from None

    def _take(self, chosen: Sequence[OpenGroup], groups: Sequence[OpenGroup], version: int) -> Taken:
        """Take this rank's chosen groups, and begin new groups up to the limit during training."""
        taken = {group.place for group in chosen}
        self._states = [
            replace(state, groups=tuple(group for group in state.groups if group.place not in taken))
            for state in self._states
        ]
        rank, _ = self.producer.share
        index_of = {group.place: index for index, group in enumerate(chosen) if group.rank == rank}
        own, produced = self._call(self.producer.take(index_of))
        for group in own:
            group.index = index_of[group.drawn.place]
        self._num_left -= 1
        self._call(self.producer.begin_groups(self._own_limit(is_training=True)))
        self._refuse_stale(own, version)
        usable, counts = usable_groups(
            own,
            produced.replaced,
            self.smallest_group,
            num_too_long=produced.num_too_long,
            weight_version=version,
        )
        self._measure(usable, groups, produced, version)
        num_continued = sum(len(c.weight_versions) > 1 for group in own for _, c in group.answers)
        return usable, replace(counts, num_continued=num_continued)

    def _own_limit(self, *, is_training: bool) -> int:
        num_open = [len(state.groups) for state in self._states]
        return self.bound.limits(num_open, self._num_left, is_training=is_training)[self.producer.share[0]]

    def _refuse_stale(self, groups: Sequence[PromptGroup], version: int) -> None:
        """Raise if a sample is older than the rules allow, which only a fault of the scheduler can cause."""
        for group in groups:
            for completion in group.sampled:
                oldest = min((span.version for span in completion.weight_versions), default=version)
                if not 0 <= version - oldest <= self.bound.max_staleness:
                    raise RolloutError(
                        f"sample {completion.request_id}: found tokens of weights {oldest}, to be trained on "
                        f"by weights {version}; expected at most rollout.max_staleness = "
                        f"{self.bound.max_staleness} versions between them. This is a fault of the scheduler: "
                        "report it."
                    )

    def _measure(
        self, own: Sequence[SampleGroup], groups: Sequence[OpenGroup], produced: Produced, version: int
    ) -> None:
        metrics = self.metrics = Metrics()
        metrics.add_max("rollout/open_groups", len(groups))
        metrics.add_max("rollout/whole_groups", sum(group.is_whole for group in groups))
        metrics.add_sum("rollout/interrupted", produced.num_interrupted)
        metrics.add_sum("rollout/prefilled_again_tokens", produced.num_prefilled_again)
        samples = (sample for group in own for sample in group.samples)
        add_ages(metrics, samples, version, self.bound.max_staleness)

    def _measure_hold(self, produced: Produced, started: float) -> None:
        training_s = max(produced.elapsed_s, 1e-9)
        self.metrics = Metrics()
        self.metrics.add_max("sync/hold_s", perf_counter() - started)
        self.metrics.add_mean("engine/busy_in_training", produced.busy_s, training_s)
        self.metrics.add_sum("engine/requests_in_training", produced.request_s / training_s)


def _refuse_endless_wait(groups: Sequence[OpenGroup], rollout: int) -> None:
    """Raise if all open groups of all ranks are sampled, because nothing would end the wait."""
    if all(group.is_whole for group in groups):
        raise RolloutError(
            f"rollout {rollout}: found all {len(groups)} open groups sampled, and none that it may train on; "
            "expected some. This is a fault of the scheduler: report it."
        )


def _describe(fault: BaseException | None) -> str | None:
    return None if fault is None else f"{type(fault).__name__}: {fault}"
