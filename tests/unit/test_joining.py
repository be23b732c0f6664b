"""Processes that meet: what stops one of them is the error of all, in time. Here ranks are threads."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import Store

from megatron_dppo.errors import LaunchError
from megatron_dppo.runtime import addresses, joining
from tests.support.ranks import free_port

Create = Callable[[Store], object]
LIMIT_S = 300.0  # of joining; what is known earlier must end earlier


@pytest.fixture(autouse=True)
def meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_ADDR and a free MASTER_PORT, and gloo on loopback."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


class Groups:
    """Groups that keep the store alive, as real ones do."""

    def __init__(self, store: Store) -> None:
        self.store = store


def fail(store: Store) -> object:
    raise RuntimeError("Gloo connectFullMesh failed with timed out connecting: remote=[127.0.1.1]\n#0 frames")


def wait_for_ever(store: Store) -> object:
    return store.get("never")


def join_all(creates: list[Create], timeout_s: float = LIMIT_S) -> tuple[list[Any], float]:
    """Result or error of each rank, and the seconds that all of them took together."""
    results: list[Any] = [None] * len(creates)

    def run(rank: int, groups: Create) -> None:
        try:
            results[rank] = joining.join(groups, rank, len(creates), timeout_s)
        except Exception as error:  # noqa: BLE001 - compared by the test
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=each, name=f"host{each[0]}", daemon=True)
        for each in enumerate(creates)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results, time.monotonic() - started


def test_all_ranks_get_their_groups() -> None:
    made = dict[int, Groups]()

    def of_rank(rank: int) -> Create:
        return lambda store: made.setdefault(rank, Groups(store))

    results, _ = join_all([of_rank(rank) for rank in range(3)])
    assert len(set(map(id, made.values()))) == 3
    assert all(results[rank] is made[rank] for rank in range(3))


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_gloo_fails_ends_those_that_wait_for_it(failing: int) -> None:
    creates: list[Create] = [wait_for_ever] * 3
    creates[failing] = fail
    results, seconds = join_all(creates)
    assert [type(result) for result in results] == [LaunchError] * 3
    assert seconds < LIMIT_S / 2
    assert len(set(map(str, results))) == 1
    for words in (f"rank {failing} (host ", "remote=[127.0.1.1]", "GLOO_SOCKET_IFNAME", "not joined either: "):
        assert words in str(results[0])
    assert "frames" not in str(results[0])


def test_unexpected_error_is_raised_unchanged_and_sent_to_the_other_ranks() -> None:
    def err(store: Store) -> object:
        raise ValueError("no such backend")

    results, seconds = join_all([wait_for_ever, err])
    assert isinstance(results[1], ValueError) and seconds < LIMIT_S / 2
    assert isinstance(results[0], LaunchError) and "rank 1: ValueError: no such backend" in str(results[0])


def test_groups_that_are_never_complete_end_in_time() -> None:
    results, seconds = join_all([wait_for_ever, wait_for_ever], timeout_s=1.5)
    assert [type(result) for result in results] == [LaunchError] * 2
    assert seconds < LIMIT_S / 2


def test_missing_ranks_are_named_and_the_hosts_that_are_there() -> None:
    with pytest.raises(LaunchError, match=r"without rank 1, 2, 3, after \d+ s") as found:
        joining.join(Groups, 0, 4, 1.0)
    assert f"run on {socket.gethostname()}." in str(found.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_master_is_named_at_once(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    started = time.monotonic()
    with pytest.raises(LaunchError, match=r"^MASTER_ADDR: found 'no-such-host\.invalid'"):
        joining.join(Groups, rank, 2, 600.0)
    assert time.monotonic() - started < LIMIT_S


def on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's thread plays a host with a separate loopback interface."""
    monkeypatch.setattr(joining, "_network", lambda: threading.current_thread().name)


def test_loopback_is_refused_on_all_ranks_if_hosts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    on_hosts(monkeypatch)
    results, seconds = join_all([Groups] * 2)
    assert [type(result) for result in results] == [LaunchError] * 2 and seconds < LIMIT_S / 2
    assert "gloo would bind 127.0.0.1, from GLOO_SOCKET_IFNAME=lo" in str(results[1])


def test_a_host_that_cannot_be_reached_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 publishes a port at which nobody listens, as behind a firewall that rejects."""
    on_hosts(monkeypatch)
    monkeypatch.setattr(joining, "is_loopback", lambda host: False)
    place_of = joining._Place.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, address: Any, listener: socket.socket) -> Any:
        if threading.current_thread().name != "host1":
            return place_of(cls, address, listener)
        with addresses.gloo_address().listen() as closed:
            return place_of(cls, address, closed)

    monkeypatch.setattr(joining._Place, "of", classmethod(of))
    results, seconds = join_all([Groups] * 3)
    assert [type(result) for result in results] == [LaunchError] * 3 and seconds < LIMIT_S / 2
    assert "expected to reach rank 1 (host " in str(results[0])
    assert "Connection refused" in str(results[0]) and "GLOO_SOCKET_IFNAME" in str(results[0])


def test_later_attempt_does_not_see_the_error_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = int(os.environ["MASTER_PORT"])
    agent = joining.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert isinstance(join_all([fail, wait_for_ever])[0][0], LaunchError)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [type(result) for result in join_all([Groups] * 2)[0]] == [Groups] * 2
    assert agent.port == port


@pytest.mark.parametrize(
    ("interface", "host", "ip", "origin"),
    [
        ("lo", "any", "127.0.0.1", "GLOO_SOCKET_IFNAME=lo"),
        ("lo,eth7", "any", "127.0.0.1", "GLOO_SOCKET_IFNAME=lo"),
        ("", "localhost", None, "the host's name localhost"),
        ("", "no-such-host.invalid", "127.0.0.1", "no address of the name no-such-host.invalid"),
        ("", "192.0.2.1", "127.0.0.1", "no address of this host under its name 192.0.2.1"),
    ],
)
def test_the_address_that_gloo_binds(
    monkeypatch: pytest.MonkeyPatch, interface: str, host: str, ip: str | None, origin: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    found = addresses.gloo_address()
    assert found.origin == origin
    assert addresses.is_loopback(found.ip) and ip in (None, found.ip)
    with found.listen() as listener:
        assert listener.getsockname()[0] == found.ip


def test_missing_interface_is_reported_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    results, seconds = join_all([Groups] * 2)
    assert [type(result) for result in results] == [LaunchError] * 2 and seconds < LIMIT_S / 2
    assert str(results[0]).startswith("GLOO_SOCKET_IFNAME: found 'eth7'")


def test_the_address_towards_a_host_is_one_that_it_reaches() -> None:
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    assert addresses.is_loopback(addresses.address_towards("localhost"))
    with pytest.raises(OSError):
        addresses.address_towards("no-such-host.invalid")
    assert json.dumps(addresses.network_interfaces())
