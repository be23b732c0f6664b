"""Connects the ranks over TCP, and ends this process from any thread, whatever blocks the main thread."""

import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_dppo.runtime.framing import FrameReader, json_frame

_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 8}
_SEND_TIMEOUT_S = 5.0
_MAX_MESSAGE = 1 << 20  # bytes
_WRITE_TIMEOUT_S = 2.0
_ending = threading.Lock()  # held by the thread that ends the process, so that no other cuts off its message

Message = dict[str, Any]


class Link:
    """A connection that carries frames of JSON objects; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        """Wrap the connection, and set its time-outs and keep-alive.

        The kernel sends keep-alive probes to an idle peer. The kernel of a busy or stopped process replies to
        them, so only a host that is gone does not reply.
        """
        self.socket = connection
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        close_in_children(connection)
        self._sending = threading.Lock()
        self._reader = FrameReader(_MAX_MESSAGE)

    def send(self, **message: Any) -> bool:
        """Send a message; return whether that worked."""
        try:
            with self._sending:
                self.socket.sendall(json_frame(message))
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the received messages, once the socket is readable; None if the other side has ended."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        try:
            return [json.loads(message) for message in self._reader.feed(data)] if data else None
        except ValueError:
            return None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def close_in_children(connection: socket.socket) -> None:
    """Close the connection in forked children; an open copy would hide their parent's death."""
    reference = weakref.ref(connection)

    def close() -> None:
        if (held := reference()) is not None:
            held.close()

    os.register_at_fork(after_in_child=close)


def listen(master: str) -> tuple[socket.socket, str]:
    """Return a listening socket on the interface of MASTER_ADDR, and the name by which other ranks reach it.

    A host's own name may mean loopback on that host. Then the socket listens on all interfaces.
    """
    is_loopback = _is_loopback(master)
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            address = str(socket.getaddrinfo(master, 0, family, socket.SOCK_STREAM)[0][4][0])
            if is_loopback or not _is_loopback(address):
                return socket.create_server((address, 0), family=family, backlog=1024), master
        except OSError:
            continue
    everywhere = socket.create_server(("", 0), backlog=1024)
    return everywhere, socket.gethostbyname(socket.gethostname()) if not _names_this_host(master) else master


def this_machine() -> str:
    """Return an id shared by processes that can signal each other; empty if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names_this_host(master: str) -> bool:
    try:
        return _is_loopback(socket.gethostbyname(master))
    except OSError:
        return False


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
