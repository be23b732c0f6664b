"""Brings the processes of a job together; what stops one of them is the error of all, within one time limit."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron_dppo.errors import LaunchError
from megatron_dppo.runtime.addresses import (
    GlooAddress,
    gloo_address,
    id_of_namespace,
    is_loopback,
    network_interfaces,
)

T = TypeVar("T")
_FAREWELL_S = 3.0, 30.0  # the store's host waits so long for the other ranks to read an error
_MAX_PAUSE_S = 0.5
_CONNECT_S = 30.0  # a host that does not respond may have lost its network for a moment
_ATTEMPT_S = 3.0
_MAX_LISTED = 8


def join(create_groups: Callable[[Store], T], rank: int, world_size: int, timeout_s: float) -> T:
    """Meet the other processes at MASTER_ADDR:MASTER_PORT, and create the process groups with them.

    Gloo connects every rank to every other one, and explains neither a wrong address nor a missing rank. So the
    ranks first publish the addresses that gloo will bind, and the hosts connect to each other.

    Args:
        create_groups: Creates the groups from the common store; called in a thread.
        rank: Rank of this process.
        world_size: Number of processes.
        timeout_s: Seconds from the start of this process to the last group.

    Returns:
        Result of `create_groups`.
    """
    meeting = _Meeting(rank, world_size, timeout_s)
    try:
        address = gloo_address()
        with address.listen() as listener:
            places = meeting.gather("arrived", json.dumps(vars(_Place.of(address, listener))))
            others = [_Place(**json.loads(place)) for place in places]
            _require_shared_addresses(others)
            meeting.connect_hosts(others)
            meeting.gather("reached", "")
        groups = meeting.run(create_groups)
        meeting.gather("joined", "")
    except LaunchError as error:
        meeting.report(str(error))
        raise
    except dist.DistError as error:  # the store's host has ended
        raise LaunchError(meeting.not_met(f"their store gone ('{_first_line(error)}')")) from error
    return groups


@dataclass(frozen=True)
class _Place:
    """Where a rank is.

    Attributes:
        host: Host name.
        network: Id of the network stack, shared by processes with one loopback interface.
        address: Address that gloo binds.
        origin: Setting or name that gave the address.
        interfaces: Names of the host's network interfaces.
        port: Port of `address` that other hosts may connect to.
    """

    host: str
    network: str
    address: str
    origin: str
    interfaces: str
    port: int

    @classmethod
    def of(cls, address: GlooAddress, listener: socket.socket) -> "_Place":
        """Describe this process."""
        host = socket.gethostname()
        port: int = listener.getsockname()[1]
        return cls(host, _network() or host, address.ip, address.origin, ", ".join(network_interfaces()), port)

    def __str__(self) -> str:
        return f"{self.address}, from {self.origin}"


class _Meeting:
    """The common store of all ranks, with a time limit for every wait."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        """Connect to the store, or start it if this rank has to."""
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._started = time.monotonic()
        self._is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        _require_known(self._host)
        if not self._is_host:
            self._wait_for_listener()
        try:
            self._store = self._open_store(self._is_host)
        except dist.DistError as error:
            raise LaunchError(self.not_met(f"'{_first_line(error)}'")) from error

    def gather(self, stage: str, value: str) -> list[str]:
        """Publish this rank's value of a stage, and return all ranks' values once the last one is there."""
        self._store.set(f"{stage}/{self._rank}", value)
        if self._store.add(stage, 1) == self._world_size:
            self._store.set(f"{stage}/complete", "")
        pause = 0.01
        while not self._store.check([f"{stage}/complete"]):
            self._raise_if_told()
            if self._left_s() <= 0:
                raise LaunchError(self._without(stage))
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)
        return [value.decode() for value in self._store.multi_get(self._keys(stage))]

    def connect_hosts(self, places: Sequence[_Place]) -> None:
        """Connect to one rank of every other host, from the first rank of this host."""
        first_of: dict[tuple[str, str, str], int] = {}
        for rank, place in enumerate(places):
            first_of.setdefault((place.host, place.network, place.address), rank)
        if self._rank not in first_of.values():
            return
        own = places[self._rank]
        for rank in first_of.values():
            if places[rank].network != own.network:
                self._connect(own, rank, places[rank])

    def run(self, create_groups: Callable[[Store], T]) -> T:
        """Create the process groups in a thread: gloo's waits are longer than the time, and end for no error.

        Raises:
            LaunchError: The groups cannot be created in time, or another rank failed meanwhile.
        """
        results: list[T] = []
        errors: list[Exception] = []
        # A wait blocks all calls on its connection, so this thread needs another one.
        store, self._store = self._store, self._open_store(is_host=False)

        def create() -> None:
            try:
                results.append(create_groups(store))
            except Exception as error:  # noqa: BLE001 - raised by the main thread
                errors.append(error)

        thread = threading.Thread(target=create, name="join", daemon=True)
        thread.start()
        while thread.is_alive() and self._left_s() > 0:
            thread.join(0.05)
            self._raise_if_told()
        if errors and not isinstance(errors[0], RuntimeError):
            self.report(f"rank {self._rank}: {type(errors[0]).__name__}: {errors[0]}")
            raise errors[0]
        if not results:
            found = f"'{_first_line(errors[0])}'" if errors else "no end of it"
            raise LaunchError(self._no_groups(found)) from next(iter(errors), None)
        return results[0]

    def report(self, message: str) -> None:
        """Tell an error to the ranks that still wait; the first one counts."""
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set("failed", message)
            self._store.add("told", 1)
            deadline = time.monotonic() + min(max(self._left_s(), _FAREWELL_S[0]), _FAREWELL_S[1])
            while self._is_host and time.monotonic() < deadline:  # its end is the store's end
                num_ranks = self._world_size if self._left_s() > 0 else self._store.add("arrived", 0)
                if self._store.add("told", 0) >= num_ranks:
                    break
                time.sleep(0.05)
        except dist.DistError:
            return

    def not_met(self, found: str) -> str:
        """Write the message of processes that did not meet."""
        waited_s = time.monotonic() - self._started
        return (
            f"expected {self._world_size} processes (WORLD_SIZE) to meet at {self._host}:{self._port} "
            f"(MASTER_ADDR:MASTER_PORT); found {found} after {waited_s:.0f} s. See that the command was "
            "started on every node and is alive, that all got the same address and a free port, and that "
            "no firewall is in between."
        )

    def _open_store(self, is_host: bool) -> Store:
        store = TCPStore(
            self._host,
            self._port,
            self._world_size,
            is_master=is_host,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            multi_tenant=is_host,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps its store over restarts
        return PrefixStore(f"megatron_dppo/{attempt}", store)

    def _left_s(self) -> float:
        return self._started + self._timeout_s - time.monotonic()

    def _keys(self, stage: str) -> list[str]:
        return [f"{stage}/{rank}" for rank in range(self._world_size)]

    def _wait_for_listener(self) -> None:
        """Wait until the port accepts connections; PyTorch's own wait would log C++ frames."""
        while True:
            try:
                timeout_s = max(0.1, self._left_s())
                socket.create_connection((self._host, self._port), timeout=timeout_s).close()
                return
            except OSError as error:
                if self._left_s() <= 0:
                    raise LaunchError(self.not_met(f"nobody listening there ({error})")) from error
            time.sleep(0.2)

    def _raise_if_told(self) -> None:
        if self._store.check(["failed"]):
            raise LaunchError(self._store.get("failed").decode())

    def _absent(self, stage: str) -> list[int]:
        return [rank for rank, key in enumerate(self._keys(stage)) if not self._store.check([key])]

    def _without(self, stage: str) -> str:
        absent = self._absent(stage)
        found = f"{self._world_size - len(absent)} of them, without rank {_listed(map(str, absent))},"
        if stage != "arrived":
            return self.not_met(found)
        here = sorted(set(range(self._world_size)) - set(absent))
        places = self._store.multi_get([f"arrived/{rank}" for rank in here])
        hosts = dict.fromkeys(_Place(**json.loads(place)).host for place in places)
        return f"{self.not_met(found)} Those that are there run on {_listed(hosts)}."

    def _connect(self, own: _Place, rank: int, place: _Place) -> None:
        # Half of the time: the error must reach the ranks that wait.
        deadline = time.monotonic() + min(_CONNECT_S, self._left_s() / 2)
        while True:
            self._raise_if_told()
            try:
                socket.create_connection((place.address, place.port), timeout=_ATTEMPT_S).close()
                return
            except OSError as error:
                is_final = error.errno in (errno.ECONNREFUSED, errno.ENETUNREACH)
                if is_final or time.monotonic() > deadline:
                    raise LaunchError(
                        f"rank {self._rank} (host {own.host}): expected to reach rank {rank} (host "
                        f"{place.host}) at {place}; found '{error}'. This rank's own address is {own}. "
                        f"{_choose_interface(place.host, place.interfaces)}"
                    ) from error

    def _no_groups(self, found: str) -> str:
        places = [_Place(**json.loads(place)) for place in self._store.multi_get(self._keys("arrived"))]
        own, absent = places[self._rank], [rank for rank in self._absent("joined") if rank != self._rank]
        listed = _listed(f"{rank} ({places[rank].host} at {places[rank]})" for rank in absent)
        return (
            f"rank {self._rank} (host {own.host}) at {own}: expected to join gloo's process groups within "
            f"{self._timeout_s:.0f} s; found {found}. Ranks that have not joined either: {listed or 'none'}. "
            f"{_choose_interface(own.host, own.interfaces)}"
        )


def _require_known(host: str) -> None:
    """Require that the name of MASTER_ADDR resolves here; a name server gets a second chance."""
    for attempt in range(3):
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN and attempt < 2:
                time.sleep(1.0)
                continue
            raise LaunchError(
                f"MASTER_ADDR: found {host!r}, which host {socket.gethostname()} cannot resolve "
                f"({error.strerror}); expected a name or an address that every node knows. Set it to the "
                "address of rank 0's node; torchrun sets it from --local-addr or --master-addr."
            ) from error


def _require_shared_addresses(places: Sequence[_Place]) -> None:
    """Refuse loopback addresses if there are several hosts: every rank finds the same."""
    if len({place.network for place in places}) == 1:
        return
    wrong = {place.host: (rank, place) for rank, place in reversed(list(enumerate(places)))}
    wrong = {host: found for host, found in wrong.items() if is_loopback(found[1].address)}
    if wrong:
        rank, place = min(wrong.values(), key=lambda found: found[0])
        raise LaunchError(
            f"rank {rank} (host {place.host}): found that gloo would bind {place}; expected an address that "
            f"the other hosts reach. {_choose_interface(place.host, place.interfaces)} Or correct the host's "
            f"name in its /etc/hosts. Hosts with such an address: {_listed(sorted(wrong))}."
        )


def _choose_interface(host: str, interfaces: str) -> str:
    return (
        "Set GLOO_SOCKET_IFNAME on each node to its interface in the nodes' network "
        f"({host} has {interfaces or 'none'}); between the nodes, all ports must be open."
    )


def _network() -> str:
    """Return an id shared by processes with one loopback interface; empty if it is unknown."""
    return id_of_namespace("net")


def _listed(items: Iterable[object]) -> str:
    names = [str(item) for item in items]
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return ", ".join(names[:_MAX_LISTED] + more)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
