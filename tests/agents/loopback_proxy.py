"""A proxy that connects only to this machine, and tells which other hosts a program tried to reach."""

import re
import select
import socket
import socketserver
import threading
from typing import Any

LOOPBACK = "127.0.0.1"


class _Tunnel(socketserver.BaseRequestHandler):
    """One proxied connection."""

    def handle(self) -> None:
        client: socket.socket = self.request
        found = re.match(rb"\w+ (?:http://)?([^/: ]*):?(\d*)", client.recv(65536))
        proxy: Any = self.server
        host, port = found.groups() if found is not None else (b"?", b"")
        if host.decode() != LOOPBACK:
            proxy.other_hosts.append(host.decode())
            return
        with socket.create_connection((LOOPBACK, int(port))) as policy:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            other = {client: policy, policy: client}
            while data := (source := select.select(list(other), [], [])[0][0]).recv(65536):
                other[source].sendall(data)


class LoopbackProxy(socketserver.ThreadingTCPServer):
    """The proxy, in threads of this process, while its block runs.

    Attributes:
        other_hosts: Hosts that a program tried to reach.
        names: Environment variables that make programs use it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), _Tunnel)
        self.other_hosts = list[str]()
        address = f"http://{LOOPBACK}:{self.server_address[1]}"
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"), address)
        self.names: dict[str, str] = {**proxies, "NO_PROXY": LOOPBACK}

    def __enter__(self) -> "LoopbackProxy":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self.shutdown()
        self.server_close()
