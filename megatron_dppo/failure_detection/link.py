"""Connects the ranks over TCP, refuses strangers, and ends this process whatever blocks its main thread."""

import errno
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_dppo.runtime.addresses import id_of_namespace, is_loopback
from megatron_dppo.runtime.framing import FrameReader, json_frame

_NETWORK_ERRORS = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
)
_UNACKNOWLEDGED = 0.75  # part of the peer time-out for which sent data may be unacknowledged
_SEND_TIMEOUT_S = 5.0
_MAX_TICK_S = 1.0  # longest counted time between two looks at a peer's silence
_HELLO_S = 10.0  # time to send the token
_MORE_STRANGERS = 64  # connections without a token, in addition to one for each rank
_MAX_MESSAGE = 1 << 20  # bytes
_WRITE_TIMEOUT_S = 2.0
_ending = threading.Lock()  # held by the thread that ends the process, so that no other cuts off its message

Message = dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """Why a connection ended.

    Attributes:
        kind: "died" if the peer's host closed the connection, because the process ended; "unreachable" if the
            host stopped responding; "silent" if only the host did; "garbled" if the peer is no rank.
        found: What the system reported.
    """

    kind: str
    found: str

    @classmethod
    def of(cls, error: OSError | None) -> "Loss":
        """Classify an error of a socket; None is a regular end of the connection."""
        if error is None:
            return cls("died", "its connection was closed")
        kind = "unreachable" if error.errno in _NETWORK_ERRORS else "died"
        return cls(kind, error.strerror or str(error))


class Link:
    """A connection that carries frames of JSON objects; any thread may send, one receives."""

    def __init__(self, connection: socket.socket, peer_timeout_s: float) -> None:
        """Wrap the connection, and set its time-outs.

        The kernel of a busy or stopped process acknowledges what is sent, so only a host that is gone, or
        cut off, ends the connection by a time-out. It does so before `peer_timeout_s` have passed: keep-alive
        probes are not sent while data is unacknowledged, and TCP_USER_TIMEOUT limits both.
        """
        self.socket = connection
        self.loss: Loss | None = None
        """Why the connection ended, as the first call found it; later calls find less."""
        every_s = max(1, round(beat_s(peer_timeout_s)))
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        timeout_ms = max(1, round(1000 * _UNACKNOWLEDGED * peer_timeout_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        close_in_children(connection)
        self._sending = threading.Lock()
        self._is_torn = False  # a message was sent in part
        self._reader = FrameReader(_MAX_MESSAGE)
        self._peer_timeout_s, self._silent_s, self._counted_at = peer_timeout_s, 0.0, time.monotonic()

    def introduce(self, token: bytes, **message: Any) -> bool:
        """Send the token and the first message; return whether that worked."""
        return self._send(token + json_frame(message))

    def send(self, **message: Any) -> bool:
        """Send a message; return whether that worked."""
        return self._send(json_frame(message))

    def receive(self) -> list[Message] | None:
        """Return the received messages, once the socket is readable; None if the connection has ended."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            if _is_own_timeout(error):
                return []
            return self._lose(Loss.of(error))
        if not data:
            return self._lose(Loss.of(None))
        self._silent_s = 0.0
        try:
            messages: list[Message] = [json.loads(message) for message in self._reader.feed(data)]
            are_messages = all(isinstance(message, dict) for message in messages)
        except (ValueError, RecursionError):
            messages, are_messages = [], False
        if not are_messages:
            return self._lose(Loss("garbled", "it sent what is no message"))
        return messages

    def is_silent(self) -> bool:
        """Add the time since the last call; return whether nothing has come for too long, which is a loss.

        Call it after `receive`, several times a second. The time in which the calling thread did not run does
        not count.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._counted_at, _MAX_TICK_S)
        self._counted_at = now
        if self._silent_s < self._peer_timeout_s:
            return False
        self._lose(Loss("silent", f"nothing came from it for {self._silent_s:.0f} s"))
        return True

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _send(self, data: bytes) -> bool:
        try:
            with self._sending:
                if self._is_torn:
                    return False
                self.socket.sendall(data)
        except OSError as error:
            self._is_torn = True
            if not _is_own_timeout(error):
                self._lose(Loss.of(error))
            return False
        return True

    def _lose(self, loss: Loss) -> None:
        self.loss = self.loss or loss


def beat_s(peer_timeout_s: float) -> float:
    """Return the seconds from one message of a rank to the next, if it has nothing else to say."""
    return peer_timeout_s / 10


def close_in_children(connection: socket.socket) -> None:
    """Close the connection in forked children; an open copy would hide their parent's death."""
    reference = weakref.ref(connection)

    def close() -> None:
        if (held := reference()) is not None:
            held.close()

    os.register_at_fork(after_in_child=close)


def this_machine() -> str:
    """Return an id shared by processes that can signal each other; empty if it is unknown."""
    return id_of_namespace("pid")


def watch_thread(serve: Callable[[], None]) -> threading.Thread:
    """Create the thread of failure detection; an error in it ends the process, which would go on unwatched."""

    def run() -> None:
        try:
            serve()
        except BaseException:  # noqa: BLE001 - whatever it is
            text = "failure detection failed, and this rank ends, because it would run unwatched. Report it."
            leave_with(f"{text}\n{traceback.format_exc()}", 1)

    return threading.Thread(target=run, name="watch", daemon=True)


def leave_at_once(exit_code: int) -> NoReturn:
    """End this process without a message."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    os._exit(exit_code)


def leave_with(text: str, exit_code: int) -> NoReturn:
    """End this process with `text` as the last output on stderr."""
    _ending.acquire()
    _try_for(_WRITE_TIMEOUT_S, _flush)
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # other threads still run, and may log
        os.dup2(nowhere, stream)
    _try_for(_WRITE_TIMEOUT_S, lambda: _write(stderr, f"\n{text.rstrip()}\n".encode()))
    os._exit(exit_code)


def state_of(pid: int) -> str:
    """Return the state of a local process from /proc, such as "T" if it is stopped; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill(pid: int) -> None:
    """Kill a local process that does not respond."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _is_own_timeout(error: OSError) -> bool:
    """Whether the socket's own time-out ended a call; ETIMEDOUT is a TimeoutError too, with a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _try_for(timeout_s: float, action: Callable[[], None]) -> None:
    """Run an action with a time limit: a full pipe, or a lock of the main thread, must not block the exit."""
    attempt = threading.Thread(target=action, daemon=True)
    attempt.start()
    attempt.join(timeout_s)


class Door:
    """The listening socket of rank 0, and the connections that have not sent the token."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        token: bytes,
        num_ranks: int,
        admit: Callable[[socket.socket], None],
    ) -> None:
        """Serve the listener through the selector, whose events are functions to call.

        Args:
            selector: Selector of the thread that calls `close_late`.
            listener: Listening socket.
            token: Bytes with which a rank's connection begins.
            num_ranks: Number of ranks that will connect.
            admit: Receives the connection of a rank, after its token.
        """
        self._selector, self._listener, self._token, self._admit = selector, listener, token, admit
        self._limit = num_ranks + _MORE_STRANGERS
        self._strangers: dict[socket.socket, tuple[bytearray, float]] = {}  # oldest first: received, deadline
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening, and close the connections without a token."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for connection in list(self._strangers):
            self._forget(connection)
            connection.close()

    def close_late(self) -> None:
        """Close the connections that have not sent the token in time; call it now and then."""
        now = time.monotonic()
        for connection, (_, deadline) in list(self._strangers.items()):
            if now > deadline or len(self._strangers) > self._limit:
                self._forget(connection)
                connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or this process has too many open files
            return
        connection.setblocking(False)
        close_in_children(connection)
        self._strangers[connection] = bytearray(), time.monotonic() + _HELLO_S
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))
        self.close_late()

    def _read(self, connection: socket.socket) -> None:
        if connection not in self._strangers:  # closed since it became readable
            return
        received, _ = self._strangers[connection]
        try:
            data = connection.recv(len(self._token) - len(received))  # no byte more, which a rank's frame has
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received += data
        if data and len(received) < len(self._token):
            return
        self._forget(connection)
        if hmac.compare_digest(bytes(received), self._token):
            self._admit(connection)
        else:
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)


def listen(master: str) -> tuple[socket.socket, str]:
    """Return a listening socket on the interface of MASTER_ADDR, and the name by which other ranks reach it.

    A host's own name may mean loopback on that host. Then the socket listens on all interfaces.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            address = str(socket.getaddrinfo(master, 0, family, socket.SOCK_STREAM)[0][4][0])
            if is_loopback(master) or not is_loopback(address):
                return socket.create_server((address, 0), family=family, backlog=1024), master
        except OSError:
            continue
    everywhere = socket.create_server(("", 0), backlog=1024)
    return everywhere, socket.gethostbyname(socket.gethostname()) if not _names_this_host(master) else master


def _names_this_host(master: str) -> bool:
    try:
        return is_loopback(socket.gethostbyname(master))
    except OSError:
        return False
