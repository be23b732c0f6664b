"""Broadcasts weights to servers in process groups of a trainer rank and all servers."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from megatron_dppo.engines.weight_sync.fleet import Fleet, Member, TensorList
from megatron_dppo.engines.weight_sync.transports import Bucket, Buffer, Weights
from megatron_dppo.runtime.addresses import address_towards, binding_gloo_to, is_loopback
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)
_POLL_S = 0.05
_GIVE_UP_S = 10.0


@dataclass(frozen=True)
class StagePlace:
    """This rank's pipeline stage, and whether this rank broadcasts for it."""

    stage: int
    num_stages: int
    speaks: bool


class DistributedTransport:
    """Pipeline stages broadcast their weights in turn, in buckets; implements `transports.Transport`.

    Groups use NCCL on GPUs, and gloo elsewhere. A group lives until a server fails or restarts.
    """

    needs_begin = True

    def __init__(
        self,
        weights: Weights,
        num_tensors: int,
        place: StagePlace,
        runtime: Runtime,
        bucket_bytes: int,
        timeout_s: float,
        together: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings, and join no group.

        Args:
            weights: Weights of this rank's pipeline stage; the stage's ranks iterate together.
            num_tensors: Number of these weights.
            place: Pipeline stage of this rank.
            runtime: Runtime of this rank.
            bucket_bytes: Size of a bucket.
            timeout_s: Time limit of one broadcast, and of joining a group.
            together: Tensors that must share a bucket with others; see `transports.Buffer`.
        """
        self._weights, self._num_tensors, self._place, self._runtime = weights, num_tensors, place, runtime
        self._buffer, self._timeout_s = Buffer(bucket_bytes, together=together), timeout_s
        self._group: _Group | None = None

    def send(self, fleet: Fleet, version: int) -> None:
        """See `Transport.send`."""
        stream = self._weights()
        for stage in range(self._place.num_stages):
            if stage == self._place.stage:
                is_last = stage == self._place.num_stages - 1
                self._send_stage(stream, fleet, version if is_last else None)
            fleet.agree(self._runtime.all_gather(fleet.failures))

    def _send_stage(self, stream: Iterator[tuple[str, Tensor]], fleet: Fleet, version: int | None) -> None:
        if not self._place.speaks:
            for _ in stream:  # all ranks of the stage gather, one sends
                pass
            return
        group = self._join(fleet)
        num_left = self._num_tensors
        for bucket in self._buffer.fill(stream):
            num_left -= len(bucket.names)
            if fleet.members and group is not None:
                self._broadcast(bucket, group, fleet, version if not num_left else None)
        assert num_left == 0, "a stage sends the number of tensors that it announced"
        if not fleet.members:
            self._leave()

    def _broadcast(self, bucket: Bucket, group: "_Group", fleet: Fleet, version: int | None) -> None:
        """Broadcast one bucket to all members; if one member fails, the group is lost for all."""
        tensors = TensorList(bucket.names, bucket.shapes, bucket.dtype)
        before = len(fleet.members)
        with fleet.calling(lambda member: member.calls.from_group(group.name, tensors, version)):
            try:
                dist.broadcast(bucket.flat.view(torch.uint8), group=group.handle, group_src=0)
            except RuntimeError as error:  # gloo raises nothing narrower
                logger.warning("weights: the group broke (%s)", str(error).splitlines()[0])
                self._leave()
        if self._group is None or len(fleet.members) < before:
            fleet.fail_all("the process group for its weight update broke")

    def _join(self, fleet: Fleet) -> "_Group | None":
        """Return the group that all members of the fleet have joined, or None if one of them did not join."""
        members = tuple(fleet.members)
        if self._group is not None and self._group.members == members:
            return self._group
        self._leave()
        if not members:
            return None
        name, host = f"weights-{uuid4().hex[:8]}-stage{self._place.stage}", _reachable_host(members)
        num_ranks = 1 + sum(member.num_ranks for member in members)
        first_rank, first = dict[str, int](), 1
        for member in members:
            first_rank[member.url], first = first, first + member.num_ranks
        timeout = timedelta(seconds=self._timeout_s)
        backend = "nccl" if self._runtime.device.type == "cuda" else "gloo"
        store = _GroupStore(host, timeout)
        with fleet.calling(
            lambda member: member.calls.join(
                name, host, store.port, backend, first_rank=first_rank[member.url], num_ranks=num_ranks
            )
        ) as has_failed:
            try:
                with binding_gloo_to(host):
                    handle = store.wait_for(
                        lambda own: _rank_zero_of(name, num_ranks, backend, own, timeout), unless=has_failed
                    )
                self._group = _Group(name, handle, store, members)
            except RuntimeError as error:
                store.close()
                found = str(error).splitlines()[0]
                logger.warning("weights: servers did not join at %s (%s)", f"{host}:{store.port}", found)
        if tuple(fleet.members) != members or self._group is None:
            fleet.fail_all("another server did not join the process group of the weight update")
            self._leave()
        return self._group

    def _leave(self) -> None:
        """Leave the group. Its servers remain in it, which costs them memory until they exit."""
        if self._group is not None:
            dist.destroy_process_group(self._group.handle)
        self._group = None

    def close(self) -> None:
        """Leave the group."""
        self._leave()


@dataclass(frozen=True, eq=False)
class _Group:
    name: str
    handle: dist.ProcessGroup
    store: "_GroupStore"  # lives as long as the group
    members: tuple[Member, ...]


class _GroupStore:
    """The store at which trainer and servers meet; closing it ends the waits of all of them."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._timeout = timeout
        self._server: TCPStore | None = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        self.port = self._server.port
        self._host = host

    def wait_for(
        self, create: Callable[[Store], dist.ProcessGroup], unless: threading.Event
    ) -> dist.ProcessGroup:
        """Create a group in a thread, through a connection to the store, unless a server refuses."""
        made: list[dist.ProcessGroup | RuntimeError] = []
        # Connected first: a store that has been closed would be tried again and again until the time-out.
        own = TCPStore(self._host, self.port, is_master=False, timeout=self._timeout)

        def run() -> None:
            try:
                made.append(create(own))
            except RuntimeError as error:  # gloo and the store raise nothing narrower
                made.append(error)

        thread = threading.Thread(target=run, name="weights", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while thread.is_alive() and not unless.is_set() and time.monotonic() < deadline:
            thread.join(_POLL_S)
        if not made:
            self.close()  # ends the thread's wait, and the servers' waits
            thread.join(_GIVE_UP_S)
        group = made[0] if made else RuntimeError("they are not complete in time")
        if not isinstance(group, RuntimeError):
            return group
        raise RuntimeError("a server refused") if unless.is_set() else group

    def close(self) -> None:
        """End the store, unless it has ended."""
        self._server = None


def _reachable_host(members: tuple[Member, ...]) -> str:
    """Return this process's address for the servers: loopback if all servers are on this host."""
    hosts = [urlsplit(member.url).hostname or "" for member in members]
    others = [host for host in hosts if not is_loopback(host)]
    return address_towards(others[0]) if others else "127.0.0.1"


def _rank_zero_of(
    name: str, num_ranks: int, backend: str, store: Store, timeout: timedelta
) -> dist.ProcessGroup:
    """Join a process group outside this job's default group as rank 0; SGLang processes are the other ranks."""
    prefixed = PrefixStore(name, store)
    private = cast(Any, c10d)
    handle, _ = private._new_process_group_helper(
        num_ranks,
        0,
        [],
        dist.Backend(backend),
        prefixed,
        group_name=name,
        backend_options=None,
        timeout=timeout,
    )
    private._world.pg_group_ranks[handle] = {rank: rank for rank in range(num_ranks)}
    return handle
