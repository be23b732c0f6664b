"""Servers of a push: their update calls, the fleet that leaves out failed servers, and their memory."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dppo.engines.sglang.client import Call, SglangClient, ask_each
from megatron_dppo.engines.sglang.records import ServerRecord, differences
from megatron_dppo.errors import MegatronDppoError, ReplyError, ServerError, WeightSyncError
from megatron_dppo.runtime.files import write_whole
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)
_MEMORY = ("weights", "kv_cache")
_DESCRIBE_S, _CONNECT_S = 30.0, 5.0


@dataclass(frozen=True)
class TensorList:
    """Names, shapes and dtype of tensors that are stored one after another in one buffer."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # torch's name: "bfloat16"


class UpdateCalls:
    """Update calls of SGLang 0.5.22 and 0.5.23.

    Updates by tensor and through a process group need `begin` before them and `end` after them; updates from
    disk do not. The prefix cache of older weights survives an update unless it is flushed. A flush while
    requests run fails the call. So servers are paused first, and only the last part of an update flushes.
    """

    pause = Call("/pause_generation", {"mode": "abort"})
    go_on = Call("/continue_generation", {"torch_empty_cache": False})
    begin = Call("/begin_weight_update", {"selector": "target"})
    end = Call("/end_weight_update", {})

    def from_disk(self, folder: str, version: int) -> Call:
        """Load the weights of a Hugging Face folder, also into a server that started without weights."""
        body = {
            "model_path": folder,
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": True,
        }
        return Call("/update_weights_from_disk", body)

    def join(self, group: str, host: str, port: int, backend: str, *, first_rank: int, num_ranks: int) -> Call:
        """Join a process group; rank 0 waits at host:port, and the server's ranks start at `first_rank`."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": num_ranks,
            "group_name": group,
            "backend": backend,
        }
        return Call("/init_weights_update_group", body)

    def from_group(self, group: str, tensors: TensorList, version: int | None) -> Call:
        """Receive one buffer that rank 0 of the group broadcasts; only the last buffer has a `version`."""
        body = {
            "names": list(tensors.names),
            "dtypes": [tensors.dtype] * len(tensors.names),
            "shapes": [list(shape) for shape in tensors.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        return Call("/update_weights_from_distributed", body | _last(version))

    def from_tensors(self, pickles: Sequence[str], version: int | None) -> Call:
        """Load one bucket through handles: for each server rank, a pickle of the flat tensor and its parts."""
        body = {"serialized_named_tensors": list(pickles), "load_format": "flattened_bucket"}
        return Call("/update_weights_from_tensor", body | _last(version))

    def release(self, *what: str) -> Call:
        """Free the memory of "weights" or "kv_cache"; the server must be idle."""
        return Call("/release_memory_occupation", {"tags": list(what)})

    def resume(self, *what: str) -> Call:
        """Allocate the memory of "weights" or "kv_cache" again; its earlier contents are lost."""
        return Call("/resume_memory_occupation", {"tags": list(what)})


def _last(version: int | None) -> dict[str, Any]:
    """Return the fields that mark the last call of a weight version, or no last call for None."""
    return {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": str(version)}


UPDATE_CALLS: Mapping[str, UpdateCalls] = MappingProxyType(dict.fromkeys(("0.5.22", "0.5.23"), UpdateCalls()))
"""Update calls by the version that a server reports."""


def update_calls_of(version: str) -> UpdateCalls:
    """Return the update calls for servers of this version."""
    if version not in UPDATE_CALLS:
        raise ServerError(
            f"found an SGLang server of version {version!r}; expected one of {', '.join(UPDATE_CALLS)}, with "
            "tested weight updates. Install one of them for sglang.python (make sglang-venv)."
        )
    return UPDATE_CALLS[version]


@dataclass(frozen=True)
class Member:
    """One server of a fleet."""

    url: str
    pid: int  # with `since`, changes when the server restarts, which loses its process groups
    num_ranks: int
    version: str
    since: str = ""  # when the process started: a container may give each process the same pid

    @property
    def process(self) -> str:
        """Identity of the server's process: URL, process id and start time."""
        return f"{self.url} {self.pid} {self.since}".rstrip()

    @property
    def calls(self) -> UpdateCalls:
        """Update calls of the server's SGLang version."""
        return update_calls_of(self.version)


class Fleet:
    """The servers of a push, and the reasons of failed ones; `agree` makes all ranks' fleets equal."""

    def __init__(self, members: Sequence[Member], api_key: str | None, timeout_s: float) -> None:
        """Store the servers; `timeout_s` limits each call."""
        self._members, self._api_key, self._timeout_s = tuple(members), api_key, timeout_s
        self.failures: dict[str, str] = {}

    @property
    def members(self) -> list[Member]:
        """Members that have not failed, always in the same order."""
        return [member for member in self._members if member.url not in self.failures]

    def tell(
        self,
        call_of: Callable[[Member], Call],
        *,
        only: Collection[Member] | None = None,
        may_be_refused: bool = False,
    ) -> None:
        """Make one call to each member, or to the members in `only`, at the same time.

        A member that fails the call leaves the fleet, unless the call `may_be_refused`.
        """
        before = dict(self.failures)
        with self.calling(call_of, only):
            pass
        if may_be_refused:
            self.failures = before

    @contextmanager
    def calling(
        self, call_of: Callable[[Member], Call], only: Collection[Member] | None = None
    ) -> Generator[threading.Event]:
        """Make calls like `tell`, and run the body while the servers work on them.

        The event is set as soon as a call has failed, so that the body does not wait for that server.
        """
        told = [member for member in self.members if only is None or member in only]
        calls, has_failed = {member.url: call_of(member) for member in told}, threading.Event()
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(asyncio.run, self._all(calls, has_failed))
            try:
                yield has_failed
            finally:
                for url, fault in answers.result().items():
                    self.fail(url, str(fault))

    def fail(self, url: str, reason: str) -> None:
        """Remove a server from the push; its first reason is kept."""
        self.failures.setdefault(url, reason)

    def fail_all(self, reason: str) -> None:
        """Remove all remaining servers from the push."""
        for member in self.members:
            self.fail(member.url, reason)

    def agree(self, failures: Sequence[Mapping[str, str]]) -> None:
        """Remove the servers that failed on any rank; `failures` has one mapping per rank, in rank order."""
        for of_rank in failures:
            for url, reason in of_rank.items():
                self.fail(url, reason)

    async def _all(
        self, calls: Mapping[str, Call], has_failed: threading.Event
    ) -> dict[str, MegatronDppoError]:
        """Make a call to each server, and return the errors of those that failed."""
        command = partial(SglangClient.command, timeout_s=self._timeout_s)
        found = await ask_each(
            {url: partial(command, call=call) for url, call in calls.items()},
            timeout_s=self._timeout_s + _CONNECT_S,
            api_key=self._api_key,
            on_failure=has_failed.set,
        )
        return {url: each for url, each in found.items() if isinstance(each, MegatronDppoError)}


async def describe(client: SglangClient, record: ServerRecord) -> Member:
    """Describe a member from what its server reports; settings of sampling are a matter of sessions."""
    info = await client.server_info()
    version, num_ranks = str(info.get("version")), info.get("tp_size")
    update_calls_of(version)
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ReplyError(f"/server_info: found {num_ranks!r} as tp_size; expected a number of processes")
    return Member(client.url, record.pid, num_ranks, version, record.since)


class RunServers:
    """Registered servers of a run, and what memory they released. All ranks call methods together.

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
        members, absent = self._runtime.on_main(lambda: self._find_members(without))
        return Fleet(members, self._api_key, self._timeout_s), absent

    def release(self) -> None:
        """Release weights and cache of every reachable server; its requests are aborted.

        A server whose process ends meanwhile has no memory left.
        """
        fleet, _ = self.fleet()
        if self._runtime.is_main:
            fleet.tell(lambda member: member.calls.pause)
            released = self._read_released()
            held = [member for member in fleet.members if member.process not in released]
            fleet.tell(lambda member: member.calls.release(*_MEMORY), only=held)
            self._keep(released | {m.process: list(_MEMORY) for m in held if m.url not in fleet.failures})
            fleet.failures = self._without_gone(fleet.failures)
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
        released = self._read_released()
        lacking = [member for member in fleet.members if what in released.get(member.process, [])]
        fleet.tell(lambda member: member.calls.resume(what), only=lacking)
        resumed = {member.process for member in lacking if member.url not in fleet.failures}
        left = {key: [w for w in kept if key not in resumed or w != what] for key, kept in released.items()}
        self._keep({key: kept for key, kept in left.items() if kept})

    def _find_members(self, without: Sequence[Member]) -> tuple[list[Member], dict[str, str]]:
        """Describe the registered servers together, but for those whose settings a push cannot reach."""
        absent: dict[str, str] = {}
        work: dict[str, Callable[[SglangClient], Awaitable[Member]]] = {}
        for record in self._records():
            found = differences(self._nccl, record.nccl)
            if found is not None:  # makes no call to it, which would leave its update open
                absent[record.url] = found
            else:
                work[record.url] = partial(describe, record=record)
        timeout_s = min(self._timeout_s, _DESCRIBE_S)
        answers = asyncio.run(ask_each(work, timeout_s=timeout_s, api_key=self._api_key))
        absent |= {url: str(each) for url, each in answers.items() if isinstance(each, MegatronDppoError)}
        members = [each for each in answers.values() if isinstance(each, Member)]
        return [member for member in members if member not in without], absent

    def _without_gone(self, failures: Mapping[str, str]) -> dict[str, str]:
        """Return the failures of servers whose processes still run, as far as their addresses tell."""
        work = dict.fromkeys(failures, SglangClient.is_gone)
        gone = asyncio.run(ask_each(work, timeout_s=_DESCRIBE_S, api_key=self._api_key))
        for url in failures:
            if gone[url] is True:
                logger.warning("server %s has ended, and its memory is free: %s", url, failures[url])
        return {url: reason for url, reason in failures.items() if gone[url] is not True}

    def _read_released(self) -> dict[str, list[str]]:
        """Return the released memory of each server process."""
        if not self._file.exists():
            return {}
        content: Any = json.loads(self._file.read_text(encoding="utf-8"))
        return content

    def _keep(self, released: Mapping[str, Sequence[str]]) -> None:
        if released != self._read_released():
            write_whole(self._file, [json.dumps(released)])
