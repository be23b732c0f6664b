"""Supplies rollouts in turn with training, and defines the types that this shares with `ahead`.

Ranks communicate only in `next`: all ranks gather their states, and apply the same pure rule to them
(`staleness`). So they agree on the prompts that come next and on stopping, and no rank enters a collective
alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeVar

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, usable_groups
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.staleness import Places, upcoming_after
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import DataCursor, SampleGroup

T = TypeVar("T")
Taken = tuple[list[SampleGroup], RolloutCounts]
"""One rank's share of a rollout: groups with rewards, and counts of everything that was sampled."""


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
    metrics: Metrics = field(default_factory=Metrics)  # stays empty; see `ahead.Ahead`

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
