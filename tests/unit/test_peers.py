"""Connections between ranks: how each one ends, what a stranger can do, and the message about it."""

import errno
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_dppo.failure_detection import link, watch
from megatron_dppo.failure_detection.link import Link, Loss
from megatron_dppo.failure_detection.report import LOST, Rank, Report, first_cause, job_failure
from megatron_dppo.runtime.framing import frame_of, json_frame
from megatron_dppo.runtime.process import Progress

RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # of SO_LINGER


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname())


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """A link, and its peer's end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener, connect(listener) as ours:
        peer, _ = listener.accept()
        with peer:
            yield Link(ours, 60.0), peer


def receive(ours: Link, limit_s: float = 120.0) -> Any:
    """What comes first, whenever it comes."""
    deadline = time.monotonic() + limit_s
    while (messages := ours.receive()) == [] and time.monotonic() < deadline:
        time.sleep(0.01)
    return messages


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ETIMEDOUT, "unreachable"),
        (errno.EHOSTUNREACH, "unreachable"),
        (errno.EHOSTDOWN, "unreachable"),
        (errno.ENETUNREACH, "unreachable"),
        (errno.ENETDOWN, "unreachable"),
        (errno.ECONNRESET, "died"),
        (errno.EPIPE, "died"),
        (errno.ECONNABORTED, "died"),
        (errno.EBADF, "died"),
    ],
)
@pytest.mark.parametrize("is_sending", [False, True])
def test_the_systems_error_tells_the_network_from_the_process(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: str, is_sending: bool
) -> None:
    error = OSError(number, os.strerror(number))

    def fail(*_: object) -> bytes:
        raise error

    ours = Link(socket.socket(), 60.0)
    ours.socket = cast(Any, SimpleNamespace(sendall=fail, recv=fail if not is_sending else lambda size: b""))
    if is_sending:
        assert not ours.send(kind="beat"), "and the end that is received later is not the cause"
    assert ours.receive() is None
    assert ours.loss == Loss(kind, os.strerror(number))


def test_a_closed_connection_is_a_death(pair: tuple[Link, socket.socket]) -> None:
    ours, peer = pair
    peer.close()
    assert receive(ours) is None
    assert ours.loss == Loss("died", "its connection was closed")


def test_a_reset_connection_is_a_death(pair: tuple[Link, socket.socket]) -> None:
    ours, peer = pair
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    peer.close()
    assert receive(ours) is None
    assert ours.loss is not None and ours.loss.kind == "died"


def test_the_sockets_own_time_out_is_no_loss(pair: tuple[Link, socket.socket]) -> None:
    ours, _ = pair
    ours.socket.settimeout(0.01)
    assert ours.receive() == [] and ours.loss is None


def test_unacknowledged_data_ends_a_connection_in_time() -> None:
    """A peer that takes nothing, so that the kernel's own limit ends the connection, with sent data waiting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with connect(listener) as connection:
            ours = Link(connection, 2.0)
            connection.settimeout(0.1)
            started = time.monotonic()
            while ours._send(bytes(1 << 16)):
                pass
            assert ours.loss is None and not ours.send(kind="beat")
            assert receive(ours) is None
            assert time.monotonic() - started < 120
            assert ours.loss == Loss("unreachable", os.strerror(errno.ETIMEDOUT))


@pytest.mark.parametrize("peer_timeout_s", [1.0, 60.0, 600.0])
def test_the_kernels_limits_are_below_the_peer_time_out(peer_timeout_s: float) -> None:
    with socket.socket() as connection:
        Link(connection, peer_timeout_s)
        options = {
            name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")
        }
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert options["TCP_USER_TIMEOUT"] / 1000 + link.beat_s(peer_timeout_s) < peer_timeout_s
    assert options["TCP_USER_TIMEOUT"] / 1000 > peer_timeout_s / 2, "a busy network is no loss"
    assert options["TCP_KEEPIDLE"] == options["TCP_KEEPINTVL"] == max(1, peer_timeout_s / 10)


def test_silence_counts_only_while_the_listener_runs(
    pair: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, peer = pair
    now = time.monotonic()
    monkeypatch.setattr(link.time, "monotonic", lambda: now)
    for _ in range(59):
        now += 1.0
        assert not ours.is_silent()
    peer.sendall(json_frame({"kind": "beat"}))
    assert receive(ours) == [{"kind": "beat"}]
    now += 10_000  # the job was suspended
    assert not ours.is_silent()
    for _ in range(58):
        now += 1.0
        assert not ours.is_silent()
    now += 1.0
    assert ours.is_silent()
    assert ours.loss == Loss("silent", "nothing came from it for 60 s")


BAD_FRAMES = [b"[" * 60_000, b"5", b"[]", b"null", b"\xff\xfe", b"", b'"token"', b'[{"kind": "end"}]']


@pytest.mark.parametrize("content", BAD_FRAMES, ids=repr)
def test_malformed_message_counts_as_a_loss(content: bytes, pair: tuple[Link, socket.socket]) -> None:
    ours, peer = pair
    peer.sendall(frame_of(content))
    assert receive(ours) is None
    assert ours.loss is not None and ours.loss.kind == "garbled"


@pytest.mark.parametrize(("num_kib", "is_read"), [(700, True), (1400, False)])
def test_a_message_is_a_mebibyte_at_most(num_kib: int, is_read: bool, pair: tuple[Link, socket.socket]) -> None:
    ours, peer = pair
    message = {"kind": "report", "text": "x" * (num_kib << 10)}
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(peer.sendall, json_frame(message))
        found = receive(ours)
        peer.shutdown(socket.SHUT_RDWR)  # also ends the sending of what nobody reads
        assert found == ([message] if is_read else None) and (ours.loss is None) == is_read
        assert sending.exception(120) is None or not is_read


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[watch.Head, int, bytes]]:
    """Rank 0 of two ranks, its port and its token; its thread must not end the process."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ends: list[str] = []
    for module in (watch, link):
        monkeypatch.setattr(module, "leave_with", lambda text, code: ends.append(text))
    runtime = SimpleNamespace(rank=0, world_size=2, progress=Progress())
    made = watch.Head(cast(Any, runtime), 1.0, 1.0, 60.0)
    _, port, token = made.open()
    yield made, port, token.encode()
    assert not ends, "no stranger ends the thread"
    assert made._thread.is_alive()
    made.leave("a normal exit")
    assert not made._thread.is_alive()


def join(made: watch.Head, port: int, token: bytes) -> socket.socket:
    """Connect as rank 1; rank 0 must welcome it."""
    member = socket.create_connection(("127.0.0.1", port))
    hello = {"kind": "hello", "rank": 1, "host": "n1", "pid": 1, "machine": ""}
    member.sendall(token + json_frame(hello))
    made.wait_for_members(120.0)
    member.settimeout(120)
    assert json.loads(member.recv(1 << 16)[4:])["kind"] == "welcome"
    return member


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side has closed the connection."""
    connection.settimeout(120)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


STRANGERS = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(200) + b"\n",
    b"[" * 60_000 + b"\n",
    frame_of(b"[" * 60_000),
    b'{"token": "\xc3\xa9"}\n' + bytes(40),
    json_frame({"kind": "hello", "token": "é", "rank": 1}),
    json_frame({"kind": "hello", "token": None, "rank": [1], "host": 5}),
    b"\xff" * 32,
    "é".encode() * 16,
    b"0" * 32,
    b"\xff\xff\xff\xff" + bytes(1 << 16),
]


def test_no_stranger_disturbs_the_ranks(head: tuple[watch.Head, int, bytes]) -> None:
    made, port, token = head
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in STRANGERS]
    for stranger, words in zip(strangers, STRANGERS, strict=True):
        stranger.sendall(words)
    for stranger in strangers:
        assert is_closed(stranger)
    for part in (b"", token[:31], b"5"):  # too short to be judged
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(part)
        strangers.append(stranger)
    gone = socket.create_connection(("127.0.0.1", port))
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    gone.close()
    member = join(made, port, token)
    assert all(is_closed(stranger) for stranger in strangers), "nobody else has a reason to connect"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=120)
    member.sendall(json_frame({"kind": "goodbye", "how": "a normal exit"}))


def test_strangers_have_a_limited_time(
    head: tuple[watch.Head, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, port, token = head
    monkeypatch.setattr(link, "_HELLO_S", 0.2)
    stranger = socket.create_connection(("127.0.0.1", port))
    assert is_closed(stranger)
    monkeypatch.setattr(link, "_HELLO_S", 60.0)
    join(made, port, token).sendall(json_frame({"kind": "goodbye", "how": "a normal exit"}))


def test_strangers_have_a_limited_number_and_the_oldest_goes() -> None:
    admitted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        at = link.Door(selector, listener, b"0123", 1, admitted.append)
        strangers = [connect(listener) for _ in range(at._limit + 3)]
        while events := selector.select(0.5):
            for key, _ in events:
                key.data()
        assert len(at._strangers) == at._limit == 1 + 64
        assert all(is_closed(stranger) for stranger in strangers[:3])
        strangers[3].sendall(b"0123 and more")
        while not admitted:
            for key, _ in selector.select(120):
                key.data()
        assert admitted[0].recv(100) == b" and more", "the token alone was read"
        at.close()
        at.close()
        for each in (*strangers, *admitted):
            each.close()


def test_the_end_of_the_watching_thread_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[str, int]] = []
    monkeypatch.setattr(link, "leave_with", lambda text, code: ends.append((text, code)))

    def serve() -> None:
        raise KeyError("kind")

    thread = link.watch_thread(serve)
    thread.start()
    thread.join(120)
    ((text, code),) = ends
    assert code == 1 and text.startswith("failure detection failed") and text.endswith("KeyError: 'kind'\n")


def lost(rank: int, kind: str) -> Report:
    return Report(rank, kind, 1, kind, f"found by {kind}", "step 3", 2.0)


@pytest.mark.parametrize("kind", LOST)
def test_the_message_says_what_was_lost_and_where_to_look(kind: str) -> None:
    ranks = {number: Rank(number, f"n{number}", number) for number in range(2)}
    assert first_cause([Report(0, "late", False, "late", "", "x", 1.0), lost(1, kind)]).kind == kind
    text = job_failure([lost(1, kind)], ranks, 5.0).text
    place = (
        f"rank 1 (host n1, pid 1) {LOST[kind].verb} in step 3, 2.0 s after getting there (found by {kind}). "
    )
    assert text == place + LOST[kind].advice


@pytest.mark.parametrize(
    ("unreachable", "words"),
    [
        ([2, 3], "Hosts that can be reached: n2."),
        ([2, 3, 4, 5], "No other host can be reached: look at this host (n0) and its network first."),
    ],
)
def test_unreachable_host_is_distinguished_from_a_broken_network(unreachable: list[int], words: str) -> None:
    ranks = {number: Rank(number, f"n{number // 2}", number) for number in range(6)}
    text = job_failure([lost(number, "unreachable") for number in unreachable], ranks, 5.0).text
    assert text.endswith(words)
    assert text.splitlines()[-1].startswith("rank 2 (host n1, pid 2) cannot be reached")
