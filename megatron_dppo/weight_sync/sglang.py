"""Pushes weights to SGLang servers: pause, update, resume, and verify."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_dppo.errors import ServerError, WeightSyncError
from megatron_dppo.rollout.sglang.engine import SglangEngine
from megatron_dppo.rollout.sglang.nccl import differences
from megatron_dppo.rollout.sglang.server import ServerRecord
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.weight_sync.base import Transport
from megatron_dppo.weight_sync.fleet import Fleet, Member, describe
from megatron_dppo.weight_sync.probe import Probe

logger = logging.getLogger(__name__)

_ROUNDS = 2  # the second is for servers that only the failure of another one kept from an update


class SglangSync:
    """Updates every server of the run, wholly or not at all; implements `weight_sync.base.WeightSync`.

    A server whose update failed gets no requests until a later push has reached it; one that was started in
    between takes part in the next. A trainer that died in the middle leaves paused servers with an open update,
    which the next push closes.
    """

    def __init__(
        self,
        transport: Transport,
        engine: SglangEngine,
        servers: Callable[[], Sequence[ServerRecord]],
        runtime: Runtime,
        *,
        probe: Probe | None,
        probe_every: int,
        colocated: bool,
        timeout_s: float,
        api_key: str | None,
        nccl: Mapping[str, str],
    ) -> None:
        """Store the settings, and call no server.

        Args:
            transport: How weights travel.
            engine: Told which servers have them; this rank's.
            servers: Those that are registered now.
            runtime: Of this rank.
            probe: Compares servers and trainer after a push.
            probe_every: Pushes from one comparison to the next; the first push is always followed by one.
            colocated: Servers gave their memory to the trainer, see `release_engine`.
            timeout_s: For each call to a server.
            api_key: What servers were started with.
            nccl: Settings that servers must share, see `nccl_settings`.
        """
        self._transport, self._engine, self._servers, self._runtime = transport, engine, servers, runtime
        self._probe, self._probe_every, self._num_pushes = probe, probe_every, 0
        self._is_colocated, self._timeout_s, self._api_key = colocated, timeout_s, api_key
        self._nccl = nccl
        self._released: frozenset[Member] = frozenset()

    def push(self, version: int) -> dict[str, float]:
        """Send all weights to all servers; see `WeightSync.push`.

        Raises:
            WeightSyncError: No server has all of them, or one computes other log-probs than the trainer.
        """
        self._runtime.barrier()  # no rank has requests on the way any more
        updated: list[Member] = []
        faults: dict[str, str] = {}
        for _ in range(_ROUNDS):
            fleet, absent = self._fleet(without=updated)
            self._update(fleet, version)
            updated += fleet.members
            faults = absent | fleet.failures
            if not fleet.failures:
                break
        for url, reason in faults.items():
            logger.warning("weights %d: %s gets no requests until a push reaches it: %s", version, url, reason)
        if not updated:
            first = next(iter(faults.values()), "run/servers names none")
            raise WeightSyncError(
                f"weight version {version}: found no SGLang server that took it (the first: {first}); "
                "expected one. See that megatron-dppo serve runs with this run's config, and look at its log."
            )
        self._engine.admit([member.url for member in updated], version)
        self._num_pushes += 1
        is_due = (self._num_pushes - 1) % self._probe_every == 0
        probed = self._probe.run(updated) if self._probe is not None and is_due else {}
        return {"sync/servers": float(len(updated)), **probed}

    def release_engine(self) -> None:
        """Release the servers' weights and cache until the next push, where they share the trainer's GPUs."""
        if not self._is_colocated:
            return
        fleet, _ = self._fleet(without=())
        if self._runtime.is_main:
            fleet.tell(lambda member: member.calls.release("kv_cache", "weights"))
        fleet.agree(self._runtime.all_gather(fleet.failures))
        if fleet.failures:
            raise WeightSyncError(
                f"found SGLang servers that keep their memory ({fleet.failures}); expected them to release it. "
                "Start them with this run's config, or set rollout.sglang.colocated = false."
            )
        self._released = frozenset(fleet.members)

    def close(self) -> None:
        """Leave process groups and remove files."""
        self._transport.close()

    def _fleet(self, without: Sequence[Member]) -> tuple[Fleet, dict[str, str]]:
        """Return the servers that answer now, without those given, and why others do not answer."""
        members, absent = self._runtime.on_main(lambda: self._answering(without))
        return Fleet(members, self._api_key, self._timeout_s), absent

    def _answering(self, without: Sequence[Member]) -> tuple[list[Member], dict[str, str]]:
        members: list[Member] = []
        absent: dict[str, str] = {}
        for record in self._servers():
            found = differences(self._nccl, record.nccl)
            if found is not None:  # before any call: its update would stay open
                absent[record.url] = found
                continue
            try:
                member = asyncio.run(describe(record.url, record.pid, self._api_key, self._timeout_s))
            except ServerError as error:
                absent[record.url] = str(error)
                continue
            if member not in without:
                members.append(member)
        return members, absent

    def _update(self, fleet: Fleet, version: int) -> None:
        """Update a whole fleet; a server that fails leaves it, paused and with the update still open."""
        started = time.perf_counter()
        if self._runtime.is_main:
            fleet.tell(lambda member: member.calls.pause)
            fleet.tell(lambda member: member.calls.resume("weights"), only=self._released)
            if self._transport.needs_begin:  # and before it the end of what a trainer before us left open
                fleet.tell(lambda member: member.calls.end, may_be_refused=True)
                fleet.tell(lambda member: member.calls.begin)
        fleet.agree(self._runtime.all_gather(fleet.failures))
        self._transport.send(fleet, version)
        if self._runtime.is_main:
            if self._transport.needs_begin:
                fleet.tell(lambda member: member.calls.end)
            fleet.tell(lambda member: member.calls.resume("kv_cache"), only=self._released)
            fleet.tell(lambda member: member.calls.go_on)
        fleet.agree(self._runtime.all_gather(fleet.failures))
        self._released -= frozenset(fleet.members)
        logger.info(
            "weights %d: %d servers in %.2f s", version, len(fleet.members), time.perf_counter() - started
        )
