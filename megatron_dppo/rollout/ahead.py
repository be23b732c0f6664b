"""Supplies rollouts that are sampled while earlier rollouts are trained on, with bounded staleness.

Only the trainer's threads communicate, in `next`: all ranks repeatedly gather one table of their open groups,
and apply the same pure rules to it (`staleness.StalenessBound`). So they agree on the groups of a rollout, on
stopping and on failing, and no rank enters a collective alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol, TypeVar

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.errors import RolloutError
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_ages
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import PromptGroup, usable_groups
from megatron_dppo.rollout.producer import Produced, Producer
from megatron_dppo.rollout.staleness import OpenGroup, Places, ProducerState, StalenessBound
from megatron_dppo.types import DataCursor, SampleGroup

T = TypeVar("T")

_POLL_S = 0.2


class AllGather(Protocol):
    """Gathers the values of all ranks of the job, as `runtime.process.Runtime.all_gather` does."""

    def __call__(self, value: T, /) -> list[T]:
        """Return every rank's value, in rank order."""
        ...


@dataclass(frozen=True)
class _Report:
    """State of one rank, gathered by all ranks while they wait for a rollout."""

    state: ProducerState
    is_asked_to_stop: bool
    fault: str | None


class Ahead:
    """Supplies one rank's share of each rollout. Every rank calls each method together."""

    def __init__(
        self,
        bound: StalenessBound,
        make_producer: Callable[[Places], Producer],
        stream: PromptStream,
        share: tuple[int, int],
        smallest_group: int,
    ) -> None:
        """Store the rules; the first `pause` starts the producer.

        Args:
            bound: Rules of staleness.
            make_producer: Makes this rank's producer, given its prompt indices.
            stream: Stream of prompts; it is never advanced.
            share: (rank, size) of the job.
            smallest_group: Minimum number of sound samples of a group.
        """
        self._bound, self._make_producer, self._stream = bound, make_producer, stream
        self._share, self._smallest_group = share, smallest_group
        self._producer: Producer | None = None
        (self._first_place, again), (_, size) = stream.upcoming, share
        places = [Places(self._first_place, again, (rank, size)) for rank in range(size)]
        self._states = [ProducerState((), each.next, tuple(each.again)) for each in places]
        self._num_left = 0
        self.metrics = Metrics()
        """Metrics of the last `next` or hold, on this rank."""

    @contextmanager
    def pause(self, version: int, num_left: int) -> Iterator[None]:
        """Pause sampling while the body pushes weights; then resume with the new weights.

        Args:
            version: Version of the pushed weights.
            num_left: Number of rollouts that the run still needs.

        Raises:
            ServerError: No server responds and has the weights.
            RolloutError: The producer failed.
        """
        if self._producer is not None:
            self._raise_fault()
            started = perf_counter()
            produced = self._producer.hold()
            self._measure_hold(produced, started)
        yield
        if self._producer is None:
            self._producer = self._make_producer(Places(*self._stream.upcoming, self._share))
        self._num_left = num_left
        if num_left:
            self._producer.go_on(version, self._own_limit(is_training=False))

    def next(
        self, version: int, all_gather: AllGather, is_asked_to_stop: Callable[[], bool]
    ) -> tuple[list[SampleGroup], RolloutCounts] | None:
        """Wait for the groups that weight version `version` trains on, and return this rank's share of them.

        Args:
            version: Version of the weights that train next, which the servers have too.
            all_gather: Gathers a value from all ranks.
            is_asked_to_stop: Returns whether this rank should stop; then all ranks stop waiting.

        Returns:
            Groups with rewards, and counts of this rank. None on all ranks if any rank should stop.

        Raises:
            RolloutError: A producer failed, no open group can end the wait, or a sample is older than the bound
                allows.
        """
        assert self._producer is not None, "weights were pushed in `pause`"
        while True:
            self._producer.news.clear()
            fault = self._producer.fault  # read once, so that all ranks see the same fault in this round
            reports = all_gather(_Report(self._producer.state(), is_asked_to_stop(), _describe(fault)))
            if any(each.is_asked_to_stop for each in reports):
                return None
            if fault is not None:
                raise fault
            for rank, each in enumerate(reports):
                if each.fault is not None:
                    raise RolloutError(f"rank {rank}: {each.fault}")
            groups = [group for each in reports for group in each.state.groups]
            chosen = self._bound.choose(groups, version)
            if chosen is not None:
                break
            _refuse_endless_wait(groups, version)
            self._producer.news.wait(_POLL_S)
        self._states = [each.state for each in reports]
        return self._take(chosen, groups, version)

    @property
    def cursor(self) -> DataCursor:
        """Cursor after the last rollout; it repeats the prompts of open groups first."""
        states, size = self._states, len(self._states)
        top = max([self._first_place, *(state.next_place - size + 1 for state in states)])
        again = {group.place for state in states for group in state.groups}
        for state in states:
            again.update(state.again, range(state.next_place, top, size))
        return self._stream.cursor_at(top, sorted(again))

    def close(self) -> None:
        """Abort requests at servers; open groups are lost."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _take(
        self, chosen: Sequence[OpenGroup], groups: Sequence[OpenGroup], version: int
    ) -> tuple[list[SampleGroup], RolloutCounts]:
        """Take this rank's chosen groups, and begin new groups up to the limit during training."""
        assert self._producer is not None, "the producer has the groups"
        taken = {group.place for group in chosen}
        self._states = [
            replace(state, groups=tuple(group for group in state.groups if group.place not in taken))
            for state in self._states
        ]
        rank, _ = self._share
        index_of = {group.place: index for index, group in enumerate(chosen) if group.rank == rank}
        own, produced = self._producer.take(index_of)
        for group in own:
            group.index = index_of[group.drawn.place]
        self._num_left -= 1
        self._producer.begin_groups(self._own_limit(is_training=True))
        self._refuse_stale(own, version)
        usable, counts = usable_groups(
            own,
            produced.replaced,
            self._smallest_group,
            num_too_long=produced.num_too_long,
            weight_version=version,
        )
        self._measure(usable, groups, produced, version)
        num_continued = sum(len(c.weight_versions) > 1 for group in own for _, c in group.answers)
        return usable, replace(counts, num_continued=num_continued)

    def _own_limit(self, *, is_training: bool) -> int:
        num_open = [len(state.groups) for state in self._states]
        return self._bound.limits(num_open, self._num_left, is_training=is_training)[self._share[0]]

    def _refuse_stale(self, groups: Sequence[PromptGroup], version: int) -> None:
        """Raise if a sample is older than the rules allow, which only a fault of the scheduler can cause."""
        for group in groups:
            for request, completion in group.answers:
                oldest = min((span.version for span in completion.weight_versions), default=version)
                if not 0 <= version - oldest <= self._bound.max_staleness:
                    raise RolloutError(
                        f"sample {request.id}: found tokens of weights {oldest}, to be trained on by weights "
                        f"{version}; expected at most rollout.max_staleness = {self._bound.max_staleness} "
                        "versions between them. This is a fault of the scheduler: report it."
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
        add_ages(metrics, samples, version, self._bound.max_staleness)

    def _measure_hold(self, produced: Produced, started: float) -> None:
        training_s = max(produced.elapsed_s, 1e-9)
        self.metrics = Metrics()
        self.metrics.add_max("sync/hold_s", perf_counter() - started)
        self.metrics.add_mean("engine/busy_in_training", produced.busy_s, training_s)
        self.metrics.add_sum("engine/requests_in_training", produced.request_s / training_s)

    def _raise_fault(self) -> None:
        if self._producer is not None and self._producer.fault is not None:
            raise self._producer.fault


def _refuse_endless_wait(groups: Sequence[OpenGroup], version: int) -> None:
    """Raise if all open groups of all ranks are sampled, because nothing would end the wait."""
    if all(group.is_whole for group in groups):
        raise RolloutError(
            f"weights {version}: found all {len(groups)} open groups sampled, and no rollout among them that "
            "may be trained on; expected one. This is a fault of the scheduler: report it."
        )


def _describe(fault: BaseException | None) -> str | None:
    return None if fault is None else f"{type(fault).__name__}: {fault}"
