"""Process groups of trainer and servers: their address, and a refusing server that ends the wait of all."""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import Store, TCPStore

from megatron_dppo.engines.weight_sync import broadcast
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.runtime import addresses
from tests.support.sglang_stand_in import StandIn, serving

TIMEOUT_S = 600.0  # of joining; a refusal is known at once

Answer = Callable[[dict[str, Any]], int]


@dataclass
class Joining(StandIn):
    """A server that replies to each call with a status."""

    status: Answer = lambda body: 200

    def respond(self, path: str, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        status = self.status(body)
        return status, {"success": status == 200, "message": f"status {status}"}


def refuse(body: dict[str, Any]) -> int:
    return 400


def wait_in_the_group(body: dict[str, Any]) -> int:
    """Wait for the other ranks as gloo does, and fail when their store has gone."""
    try:
        TCPStore(body["master_address"], body["master_port"], is_master=False).wait(["never"])
    except RuntimeError:
        return 400
    return 200


def fail_late(body: dict[str, Any]) -> int:
    time.sleep(0.5)
    return 500


@pytest.mark.parametrize("answers", [[refuse], [wait_in_the_group, refuse], [fail_late, wait_in_the_group]])
def test_a_refused_group_ends_the_push_at_once(answers: list[Answer]) -> None:
    transport = broadcast.DistributedTransport(
        lambda: iter(()),
        0,
        broadcast.StagePlace(0, 1, speaks=True),
        cast(Any, SimpleNamespace(device=torch.device("cpu"))),
        bucket_bytes=1,
        timeout_s=TIMEOUT_S,
    )
    with serving(*(Joining(status=each) for each in answers)) as urls:
        members = [Member(url, 1, 1, "0.5.23") for url in urls]
        fleet = Fleet(members, None, TIMEOUT_S)
        before, started = set(threading.enumerate()), time.monotonic()
        assert transport._join(fleet) is None
        assert time.monotonic() - started < TIMEOUT_S / 4
        assert not fleet.members and set(fleet.failures) == {member.url for member in members}
        for thread in set(threading.enumerate()) - before:
            if thread.name == "weights":
                thread.join(TIMEOUT_S / 4)
                assert not thread.is_alive(), "the trainer's own wait has ended"


def test_a_group_of_no_server_is_made_of_the_trainer_alone() -> None:
    """The thread's connection to the store is its own, and the store stays as long as the group."""
    store = broadcast._GroupStore("127.0.0.1", broadcast.timedelta(seconds=TIMEOUT_S))
    never = threading.Event()
    group: Any = store.wait_for(lambda own: cast(Any, (own, own.set("made", "1"))), unless=never)
    assert group[0].get("made") == b"1"


def test_a_server_that_refuses_before_the_wait_begins_ends_it() -> None:
    """Whatever the thread does first, it finds the store closed at once, not after the time-out of joining."""
    store = broadcast._GroupStore("127.0.0.1", broadcast.timedelta(seconds=TIMEOUT_S))
    refused, ended = threading.Event(), threading.Event()
    refused.set()

    def wait(own: Store) -> Any:
        time.sleep(0.5)
        try:
            own.wait(["never"])
        finally:
            ended.set()

    with pytest.raises(RuntimeError, match="refused"):
        store.wait_for(wait, unless=refused)
    assert ended.wait(TIMEOUT_S / 4)


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], "127.0.0.1"),
        (["http://127.0.0.1:1", "http://192.0.2.7:2"], "towards 192.0.2.7"),
        (["http://n2:1", "http://n3:2"], "towards n2"),
        (["http://[fd99::2]:1"], "towards fd99::2"),
    ],
)
def test_servers_meet_the_trainer_at_its_address_in_their_network(
    monkeypatch: pytest.MonkeyPatch, urls: list[str], expected: str
) -> None:
    """Not at the name of its host, which may mean loopback there and nothing elsewhere."""
    monkeypatch.setattr(broadcast, "address_towards", lambda host: f"towards {host}")
    assert broadcast._reachable_host(tuple(Member(url, 1, 1, "0.5.23") for url in urls)) == expected


@pytest.mark.parametrize(
    ("given", "ip", "inside"),
    [
        (None, "10.0.0.2", "eth1"),
        (None, "fd99::1", "eth0"),
        (None, "127.0.0.1", None),
        ("eth0", "10.0.0.2", "eth0"),
    ],
)
def test_gloo_binds_the_address_unless_the_user_named_an_interface(
    monkeypatch: pytest.MonkeyPatch, given: str | None, ip: str, inside: str | None
) -> None:
    of = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fd99::1"], "eth1": ["10.0.0.2"]}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(of, 1)))
    monkeypatch.setattr(addresses, "_addresses_of", of.__getitem__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    with addresses.binding_gloo_to(ip):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == inside
    assert os.environ.get("GLOO_SOCKET_IFNAME") == given
