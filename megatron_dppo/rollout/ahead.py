"""Supplies rollouts ahead of training: samples open groups while the trainer trains and pushes weights.

`Producer` samples one rank's open groups in a separate thread. A push interrupts responses, and drops none
(`sampler.GroupSampler`). `Ahead` limits the number of open groups, and takes the groups of a rollout. Only the
trainer's threads communicate, in `Ahead.next`: all ranks gather their states, and apply the same pure rules to
them (`staleness`). So they agree on the groups of a rollout, on stopping and on failing, and no rank enters a
collective alone. The producers of different ranks never communicate.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.errors import RolloutError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_ages
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, usable_groups
from megatron_dppo.rollout.sampler import GroupSampler, Produced
from megatron_dppo.rollout.scheduling import AllGather, RunUnlessAsked, Taken
from megatron_dppo.rollout.staleness import (
    OpenGroup,
    Places,
    ProducerState,
    StalenessBound,
    upcoming_after,
)
from megatron_dppo.runtime.concurrency import LoopThread
from megatron_dppo.types import DataCursor, SampleGroup

T = TypeVar("T")

_POLL_S = 0.2
_ANSWER_S = 120.0  # limit of a call of the producer that waits for no server
_HOLD_S = 900.0  # a session limits only the time between two replies, and hundreds of long ones are decoded
_CONNECT_S = 1800.0  # far above the sum of the client's limits for a connection


@dataclass(eq=False)
class Producer:
    """Keeps one rank's groups open, and samples them between `go_on` and `hold`.

    All methods run in the producer's thread. An error there is kept as `fault`, and the trainer's thread raises
    it. Every wait has a limit: rollout.sglang.request_timeout_s for a request at each server, the time-outs of
    [data] for a reward or an environment, and the session's limit for a hold. The wait for a rollout also ends,
    with a fault, if all prompts are too long, or if a task was cancelled.

    Attributes:
        news: Set when a group becomes whole.
    """

    maker: GroupMaker
    sampler: GroupSampler  # its engine can abort responses
    stream: PromptStream
    share: tuple[int, int]  # (rank, size) of the job
    num_threads: int = 1  # environments that may be reset at once
    max_replaced: int = 0  # groups with equal rewards that may be replaced per rollout

    def __post_init__(self) -> None:
        self._places = Places(*self.stream.upcoming, self.share)
        self._num_too_long_in_a_row = 0
        self._open: dict[int, PromptGroup | None] = {}  # by place; None until its prompt is ready
        self._threads = ThreadPoolExecutor(max(self.num_threads, 1), thread_name_prefix="environment")
        self.news = threading.Event()

    @property
    def fault(self) -> BaseException | None:
        """Error that ended the producer's work, or None."""
        return self.sampler.fault

    async def go_on(self, version: int, limit: int) -> None:
        """Start or resume sampling with the servers' weights, with up to `limit` open groups.

        Args:
            version: Version of these weights.
            limit: Number of groups that may be open on this rank.

        Raises:
            ServerError: No server responds and has the weights.
        """
        await self.sampler.go_on(version)
        await self.begin_groups(limit)

    async def begin_groups(self, limit: int) -> None:
        """Begin groups until `limit` are open."""
        while len(self._open) < limit:
            self._begin_next()

    def _begin_next(self) -> None:
        place = self._places.take()
        self._open[place] = None
        self.sampler.start(self._begin(place))

    def _replace(self, place: int) -> None:
        """Replace a group by the next one in one step, so that the number of open groups does not change."""
        del self._open[place]
        self._begin_next()

    async def _begin(self, place: int) -> None:
        """Make a group and start its responses; if its prompt is too long, replace it by the next group."""
        groups = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self.maker.begin(None, [(place, self.stream.at(place))])
        )
        if not groups:
            self.sampler.count(num_too_long=1)
            self._num_too_long_in_a_row += 1
            self._refuse_if_all_too_long()
            self._replace(place)
            return
        (group,) = groups
        self._num_too_long_in_a_row, self._open[place] = 0, group
        self.sampler.begin(group, self._keep)

    def _refuse_if_all_too_long(self) -> None:
        if self._num_too_long_in_a_row >= self.stream.num_prompts:
            raise RolloutError(
                f"rollout: found {self._num_too_long_in_a_row} prompts in a row longer than "
                f"data.max_prompt_tokens, out of {self.stream.num_prompts} prompts; expected some to sample "
                "from. Raise the limit, or shorten the prompts or the text that environments add."
            )

    def _keep(self, group: PromptGroup) -> None:
        """Keep a group that is whole until it is taken; replace it if all rewards are equal."""
        group.born = self.sampler.version if group.born is None else group.born  # None only without a token
        num_replaced = len(self.sampler.counts(starts_again=False).replaced)
        if group.has_zero_variance and num_replaced < self.max_replaced:
            self.sampler.count(replaced=(group,))
            self._replace(group.drawn.place)
        self.news.set()

    async def hold(self) -> Produced:
        """Stop sampling until `go_on`. Wait until no request is at a server; sampled tokens are kept.

        Returns:
            Counts and times between the last `take` and this call.
        """
        produced = self.sampler.counts(starts_again=False)
        await self.sampler.hold()
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
        return groups, self.sampler.counts(starts_again=True)

    async def end(self) -> None:
        """Abort requests at servers, and end all tasks; open groups are lost."""
        try:
            await self.hold()
        finally:
            await self.sampler.aclose()
            self._threads.shutdown(wait=False, cancel_futures=True)


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
