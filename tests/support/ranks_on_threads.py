"""Threads that play ranks, so that collective code is tested without processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

from torch import Tensor

from megatron_dppo.data.batches.exchange import DataParallel

T = TypeVar("T")


@dataclass
class Meeting:
    """Where the ranks of one job hand each other values."""

    world_size: int
    barrier: Barrier = field(init=False)
    slots: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.slots = Barrier(self.world_size, timeout=300), [None] * self.world_size


@dataclass(frozen=True)
class Peer:
    """One rank, as `megatron_dppo.data.batches.exchange.Peers` asks for."""

    rank: int
    meeting: Meeting

    def all_gather(self, value: T) -> list[T]:
        self.meeting.slots[self.rank] = value
        self.meeting.barrier.wait()
        gathered = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return gathered

    def exchange(self, parcels: list[Tensor]) -> list[Tensor]:
        sent = [parcel.clone() for parcel in parcels]
        parcels.clear()
        return [parcels_of[self.rank] for parcels_of in self.all_gather(sent)]


def alone() -> DataParallel:
    """A job of one rank."""
    return DataParallel((0,), Peer(0, Meeting(1)))


def on_ranks(work: Callable[[DataParallel], T], group_of_rank: tuple[int, ...]) -> list[T]:
    """`work(data_parallel)` on one thread per rank; the results in rank order."""
    meeting = Meeting(len(group_of_rank))

    def run(rank: int) -> T:
        try:
            return work(DataParallel(group_of_rank, Peer(rank, meeting)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(group_of_rank)) as pool:
        return list(pool.map(run, range(len(group_of_rank))))
