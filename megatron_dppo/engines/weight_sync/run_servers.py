"""Finds the run's SGLang servers, and releases and resumes the memory of colocated servers."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.engines.sglang.nccl import differences
from megatron_dppo.engines.sglang.server import ServerRecord
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member, describe
from megatron_dppo.errors import ServerError, WeightSyncError
from megatron_dppo.runtime.files import write_whole
from megatron_dppo.runtime.process import Runtime

_MEMORY = ("weights", "kv_cache")


class RunServers:
    """Registered servers of a run, and the record of their released memory. All ranks call methods together.

    A file next to the registrations records which memory is released. A server exits if it must resume memory
    that it has not released, and the trainer that released the memory may have died.
    """

    def __init__(
        self,
        records: Callable[[], Sequence[ServerRecord]],
        runtime: Runtime,
        released: Path,
        *,
        timeout_s: float,
        api_key: str | None,
        nccl: Mapping[str, str],
    ) -> None:
        """Store the settings, and call no server.

        Args:
            records: Returns the current registrations.
            runtime: Runtime of this rank.
            released: File with the record of released memory; used by rank 0.
            timeout_s: Time limit of each call to a server.
            api_key: API key that servers were started with.
            nccl: NCCL settings that servers must share; see `nccl_settings`.
        """
        self._records, self._runtime, self._file = records, runtime, released
        self._timeout_s, self._api_key, self._nccl = timeout_s, api_key, nccl

    def fleet(self, without: Sequence[Member] = ()) -> tuple[Fleet, dict[str, str]]:
        """Return the reachable servers except `without`, and the reasons why other servers are left out."""
        members, absent = self._runtime.on_main(lambda: self._answering(without))
        return Fleet(members, self._api_key, self._timeout_s), absent

    def release(self) -> None:
        """Release weights and cache of every reachable server; its requests are aborted.

        Raises:
            WeightSyncError: A server keeps its memory.
        """
        fleet, _ = self.fleet()
        if self._runtime.is_main:
            fleet.tell(lambda member: member.calls.pause)
            released = self._released()
            held = [member for member in fleet.members if _key(member) not in released]
            fleet.tell(lambda member: member.calls.release(*_MEMORY), only=held)
            self._keep(released | {_key(m): list(_MEMORY) for m in held if m.url not in fleet.failures})
        fleet.agree(self._runtime.all_gather(fleet.failures))
        if fleet.failures:
            raise WeightSyncError(
                f"found SGLang servers that keep their memory ({fleet.failures}); expected them to release it. "
                "Start them with this run's config, or set rollout.sglang.colocated = false."
            )
        self._runtime.gpu_ledger.leaves("engine cache")
        self._runtime.gpu_ledger.leaves("engine weights")

    def resume(self, fleet: Fleet, what: str) -> None:
        """Resume memory that servers have released; a server that fails leaves the fleet. Only rank 0 calls it.

        Args:
            fleet: Fleet of this push.
            what: Memory to resume, "weights" or "kv_cache".
        """
        released = self._released()
        lacking = [member for member in fleet.members if what in released.get(_key(member), [])]
        fleet.tell(lambda member: member.calls.resume(what), only=lacking)
        resumed = {_key(member) for member in lacking if member.url not in fleet.failures}
        left = {key: [w for w in kept if key not in resumed or w != what] for key, kept in released.items()}
        self._keep({key: kept for key, kept in left.items() if kept})

    def _answering(self, without: Sequence[Member]) -> tuple[list[Member], dict[str, str]]:
        members: list[Member] = []
        absent: dict[str, str] = {}
        for record in self._records():
            found = differences(self._nccl, record.nccl)
            if found is not None:  # makes no call to it, which would leave its update open
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

    def _released(self) -> dict[str, list[str]]:
        """Return the released memory of each server, by URL and process id."""
        if not self._file.exists():
            return {}
        content: Any = json.loads(self._file.read_text(encoding="utf-8"))
        return content

    def _keep(self, released: Mapping[str, Sequence[str]]) -> None:
        if released != self._released():
            write_whole(self._file, [json.dumps(released)])


def _key(member: Member) -> str:
    return f"{member.url} {member.pid}"
