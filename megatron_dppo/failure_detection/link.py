"""Connects the ranks over TCP, and ends this process from any thread, whatever blocks the main thread."""

import errno
import json
import os
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
_MAX_MESSAGE = 1 << 20  # bytes
_WRITE_TIMEOUT_S = 2.0
_ending = threading.Lock()  # held by the thread that ends the process, so that no other cuts off its message

Message = dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """Why a connection ended.

    Attributes:
        kind: "died" if the peer's host closed the connection, because the process ended; "unreachable" if the
            host did not answer any more; "silent" if only the host did; "garbled" if the peer is no rank.
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
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


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
