"""Sends calls to all servers of one push, and leaves out servers that fail."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.update_calls import Call, UpdateCalls, update_calls_of
from megatron_dppo.errors import ServerError


@dataclass(frozen=True)
class Member:
    """One server of a fleet."""

    url: str
    pid: int  # changes when the server restarts, which loses its process groups
    num_ranks: int
    version: str

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
        with self.telling(call_of, only):
            pass
        if may_be_refused:
            self.failures = before

    @contextmanager
    def telling(
        self, call_of: Callable[[Member], Call], only: Collection[Member] | None = None
    ) -> Iterator[None]:
        """Make calls like `tell`, and run the body while the servers work on them."""
        told = [member for member in self.members if only is None or member in only]
        calls = {member.url: call_of(member) for member in told}
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(run_in_thread, self._all(calls))
            try:
                yield
            finally:
                for url, fault in answers.result().items():
                    if fault is not None:
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

    async def _all(self, calls: Mapping[str, Call]) -> dict[str, ServerError | None]:
        async def one(url: str, call: Call) -> ServerError | None:
            try:
                async with SglangClient(url, api_key=self._api_key) as client:
                    await client.command(call, self._timeout_s)
            except ServerError as error:
                return error
            return None

        faults = await asyncio.gather(*(one(url, call) for url, call in calls.items()))
        return dict(zip(calls, faults, strict=True))


def run_in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new event loop in this thread."""
    return asyncio.run(work)


async def describe(url: str, pid: int, api_key: str | None, timeout_s: float) -> Member:
    """Describe a member from its server's reply, within `timeout_s`, or twice that after one retry.

    Raises:
        ServerError: The server does not reply, or weight updates are not supported for its version.
    """
    patience = Patience(control_timeout_s=min(timeout_s, 30.0), max_attempts=2)
    async with SglangClient(url, patience, api_key=api_key) as client:
        _, facts = await client.connect()
    update_calls_of(facts.version)
    return Member(url, pid, facts.num_ranks, facts.version)
