"""Lets in ranks that know the job's token; every other connection is closed before anything of it is parsed."""

import hmac
import selectors
import socket
import time
from collections.abc import Callable

from megatron_dppo.failure_detection.link import close_in_children
from megatron_dppo.runtime.addresses import is_loopback

_HELLO_S = 10.0  # time to send the token
_MORE_STRANGERS = 64  # connections without a token, in addition to one for each rank


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
