"""Supplies the rollouts of a run: admits groups, waits until they are whole, and takes those to train on.

The synchronous and the asynchronous loop share it. If `rollout.max_staleness` is S > 0, groups begin after each
push, and `producer.Producer` samples them in a separate thread while the trainer trains. A push interrupts
responses, and drops none. If S = 0, groups begin in `Scheduler.next` and none is open after it, so the producer
runs in the trainer's thread, where a stop signal interrupts it.

Ranks communicate only in `Scheduler.next`: all ranks gather their states, and apply the same pure rules to them
(`staleness`). So they agree on the groups of a rollout, on stopping and on failing, and no rank enters a
collective alone. The producers of different ranks never communicate.
"""

import os
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from megatron_dppo.errors import RolloutError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_ages
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import PromptGroup, usable_groups
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import Produced
from megatron_dppo.rollout.staleness import (
    OpenGroup,
    Places,
    ProducerState,
    StalenessBound,
    upcoming_after,
)
from megatron_dppo.runtime.concurrency import CallerLoop, LoopThread
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


@dataclass(frozen=True)
class _Report:
    """State of one rank, gathered by all ranks while they wait for a rollout."""

    state: ProducerState | None  # None if the rank failed, or was asked to stop
    fault: str | None


@dataclass(eq=False)
class Scheduler:
    """Supplies one rank's share of each rollout; every rank calls each method together.

    With S > 0 the methods raise a RolloutError if the producer's thread does not return within 120 s (900 s for
    a hold, 1800 s to resume).
    """

    bound: StalenessBound
    producer: Producer
    smallest_group: int  # minimum number of sound samples of a group
    metrics: Metrics = field(default_factory=Metrics)  # of the last `next` or `pause`, on this rank; S > 0

    def __post_init__(self) -> None:
        self._is_ahead, self._num_left = self.bound.max_staleness > 0, 0
        self._loop = LoopThread("rollout producer") if self._is_ahead else CallerLoop()
        upcoming, (_, size) = self.producer.stream.upcoming, self.producer.share
        self._states = [Places(*upcoming, (rank, size)).state() for rank in range(size)]
        self._fault: BaseException | None = None  # of this rank's producer, until `next`

    @contextmanager
    def pause(self, version: int, num_left: int) -> Generator[None]:
        """See `Rollouts.pause`; with S > 0 the first call starts the thread.

        The body has collectives that all ranks enter. So if this rank's producer fails, `next` raises its
        error, on all ranks.
        """
        if self._is_ahead and self._loop.has_started:
            self._keep_fault(self._hold)
        yield
        self._num_left = num_left
        if self._is_ahead and num_left:
            self._keep_fault(lambda: self._resume(version))

    def _hold(self) -> None:
        started = perf_counter()
        produced = self._call(self.producer.hold(), _HOLD_S)
        self._measure_hold(produced, started)

    def _resume(self, version: int) -> None:
        self._call(self.producer.go_on(version, self._own_limit(is_training=False)), _CONNECT_S)

    def _keep_fault(self, work: Callable[[], None]) -> None:
        """Run work of the producer, unless it has failed, and keep an error for `next`."""
        self._fault = self._fault or self.producer.sampler.fault
        if self._fault is None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - `next` raises it, on all ranks
                self._fault = error

    def next(
        self, rollout: int, version: int, all_gather: AllGather, run_unless_asked: RunUnlessAsked
    ) -> Taken | None:
        """Wait for the groups that these weights train on, and return this rank's; see `Rollouts.next`."""
        work = self._look if self._is_ahead else partial(self._begin, rollout, version)
        while True:
            state = fault = None
            try:
                if self._fault is not None:
                    raise self._fault
                state = run_unless_asked(work)
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                fault = error
            reports = all_gather(_Report(state, _describe(fault)))
            if any(each.state is None and each.fault is None for each in reports):
                return None
            if fault is not None:
                raise fault
            for rank, each in enumerate(reports):
                if each.fault is not None:
                    raise RolloutError(f"rank {rank}: {each.fault}")
            states = [each.state for each in reports if each.state is not None]
            groups = [group for state in states for group in state.groups]
            chosen = self.bound.choose(groups, version)
            if chosen is not None:
                return self._take(chosen, states, version)
            _refuse_endless_wait(groups, rollout)
            work = self._wait

    @property
    def cursor(self) -> DataCursor:
        """Cursor after the last rollout; it repeats the prompts of open groups first."""
        return self.producer.stream.cursor_at(*upcoming_after(self._states))

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each of several prompt files; see `PromptStream.epochs`."""
        return self.producer.stream.epochs(upcoming_after(self._states)[0])

    def close(self) -> None:
        """Abort requests at servers, and end the producer; open groups are lost."""
        if self._loop.has_started:
            try:
                self._call(self.producer.end(), _HOLD_S)
            finally:
                self._loop.close(_ANSWER_S)

    def _begin(self, rollout: int, version: int) -> ProducerState:
        """Begin the groups of a rollout (S = 0), and wait as `_wait` does."""
        rank, size = self.producer.share
        limit = self.bound.limits([0] * size, 1, is_training=False)[rank]
        places = Places(*upcoming_after(self._states), (rank, size))
        self._call(self.producer.begin_rollout(rollout, version, places, limit), _CONNECT_S)
        return self._wait()

    def _look(self) -> ProducerState:
        return self._call(self.producer.progress(0.0))

    def _wait(self) -> ProducerState:
        return self._call(self.producer.progress(None if self.producer.in_rounds else _POLL_S))

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine of the producer in its loop, and return its result."""
        timeout_s, name = _ANSWER_S if timeout_s is None else timeout_s, work.__name__
        try:
            return self._loop.call(work, timeout_s)
        except TimeoutError:
            raise RolloutError(
                f"thread that samples ahead: found no reply to {name!r} within {timeout_s:g} s; expected one. "
                f"Look at the stack of process {os.getpid()} (py-spy dump). Start the run again: it resumes."
            ) from None

    def _take(self, chosen: Sequence[OpenGroup], states: Sequence[ProducerState], version: int) -> Taken:
        """Take this rank's chosen groups. Then begin new groups up to the limit, or drop the others (S = 0)."""
        groups, (rank, _) = [group for state in states for group in state.groups], self.producer.share
        index_of = {group.place: index for index, group in enumerate(chosen) if group.rank == rank}
        own, produced = self._call(self.producer.take(index_of))
        for group in own:
            group.index = index_of[group.drawn.place]
        left = set(groups) - set(chosen) if self._is_ahead else set[OpenGroup]()
        self._states = [replace(state, groups=tuple(g for g in state.groups if g in left)) for state in states]
        dropped = list[PromptGroup]()
        if self._is_ahead:
            self._num_left -= 1
            self._call(self.producer.begin_groups(self._own_limit(is_training=True)))
            self._refuse_stale(own, version)
        else:
            dropped = self._call(self.producer.finish_rollout(), _HOLD_S)
        usable, counts = usable_groups(
            own,
            produced.replaced,
            self.smallest_group,
            num_too_long=produced.num_too_long,
            weight_version=version,
            rest=dropped,
        )
        if self._is_ahead:
            self._measure(usable, groups, produced, version)
        return usable, counts

    def _own_limit(self, *, is_training: bool) -> int:
        num_open = [len(state.groups) for state in self._states]
        return self.bound.limits(num_open, self._num_left, is_training=is_training)[self.producer.share[0]]

    def _refuse_stale(self, groups: Sequence[PromptGroup], version: int) -> None:
        """Raise if a sample is older than the rules allow, which only a fault of the scheduler can cause."""
        for group in groups:
            for sample in group.all_sampled:
                oldest = min((span.version for span in sample.weight_versions), default=version)
                if not 0 <= version - oldest <= self.bound.max_staleness:
                    raise RolloutError(
                        f"sample {sample.id}: found tokens of weights {oldest}, to be trained on "
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
