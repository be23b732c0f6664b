"""Finds this host's addresses: its interfaces', the one towards another host, and the one that gloo binds."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import LaunchError

_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # scope in /proc/net/if_inet6


@dataclass(frozen=True)
class GlooAddress:
    """Address that gloo binds on this host, and the setting or name that gave it."""

    ip: str
    origin: str

    def listen(self) -> socket.socket:
        """Return a listening socket on the address, on a free port."""
        family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET
        try:
            return socket.create_server((self.ip, 0), family=family, backlog=1024)
        except OSError as error:
            raise LaunchError(
                f"host {socket.gethostname()}: found that {self.ip} ({self.origin}) cannot be bound ({error}); "
                "expected an address of this host. Correct its name in /etc/hosts, or set GLOO_SOCKET_IFNAME."
            ) from error


def gloo_address() -> GlooAddress:
    """Return the address that gloo will bind: of GLOO_SOCKET_IFNAME, of the host's name, or loopback."""
    host = socket.gethostname()
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        if not (found := _addresses_of(name)):
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME: found {name!r}, which is no interface with an address on host {host}; "
                f"expected one of {', '.join(network_interfaces())}. Correct it, or leave it out."
            )
        return GlooAddress(found[0], f"GLOO_SOCKET_IFNAME={name}")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return GlooAddress("127.0.0.1", f"no address of the name {host}")
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as attempt:
            try:
                attempt.bind(address)
            except OSError:
                continue
        return GlooAddress(str(address[0]), f"the host's name {host}")
    return GlooAddress("127.0.0.1", f"no address of this host under its name {host}")


def network_interfaces() -> list[str]:
    """Return the names of this host's interfaces that have an address, without loopback."""
    return [name for _, name in socket.if_nameindex() if name != "lo" and _addresses_of(name)]


def address_towards(host: str) -> str:
    """Return this host's address on the route to another host."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)  # of a datagram socket: sends nothing
        return str(route.getsockname()[0])


@contextmanager
def binding_gloo_to(ip: str) -> Iterator[None]:
    """Let groups that are created in the body bind an address of this host, unless GLOO_SOCKET_IFNAME is set.

    Gloo takes no address, and reads the variable when a group is created.
    """
    names = [name for name in network_interfaces() if ip in _addresses_of(name)]
    if os.environ.get("GLOO_SOCKET_IFNAME") or not names:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = names[0]
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def is_loopback(host: str) -> bool:
    """Return whether an address, or "localhost", means the host that uses it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def id_of_namespace(kind: str) -> str:
    """Return an id shared by processes of one boot in one namespace ("net", "pid"); empty if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path(f'/proc/self/ns/{kind}').readlink()}"
    except OSError:
        return ""


def _addresses_of(interface: str) -> list[str]:
    """Return the IPv4 address of an interface, then its IPv6 addresses, with link-local ones last."""
    addresses: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        addresses.append(socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        found = sorted((row[3] == _LINK_LOCAL, row[0]) for row in rows if row[5] == interface)
        addresses += [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) for _, digits in found]
    return addresses
