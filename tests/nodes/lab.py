"""Several machines on one: each node has its own network, host name, processes, IPC, /tmp, /dev/shm and /run.

A node's network cards are TAP devices. A switch in a thread carries frames between them and can cut a node off:
neither a bridge nor netem is needed. Everything is in namespaces, and ends with the process that made it.
"""

import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NETWORKS = ("10.99.0", "10.98.0")  # IPv4 of a node's cards
NETWORKS_V6 = ("fd99::", "fd98::")
_PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "ip", "bash", "hostname", "env")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_START_TIMEOUT_S = 120.0
_FRAME_BYTES = 1 << 16
_RIGHTS = (
    "expected the right to make namespaces and network devices. Run as root: sudo make test-nodes. A container "
    "needs --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN --device /dev/net/tun and no profile of "
    "AppArmor or seccomp that forbids mounts."
)
_INIT = """
set -e
mount --make-rprivate /
hostname "$1"
for folder in /dev/shm /run; do mount -t tmpfs -o mode=1777 tmpfs "$folder"; done
mkdir /run/tmp /run/lock
mount -t tmpfs -o mode=1777 tmpfs /run/tmp
for folder in "${@:3}"; do
    mkdir -p "/run/tmp/${folder#/tmp/}"
    mount --rbind "$folder" "/run/tmp/${folder#/tmp/}"
done
mount --move /run/tmp /tmp
cp "$2" /run/hosts
mount --bind /run/hosts /etc/hosts
ip link set lo up
touch /run/ready
trap : TERM USR1 HUP INT
while :; do sleep 1000 & wait $!; done
"""
"""The first process of a node: name, file of hosts, folders below /tmp that all nodes see."""


class LabError(RuntimeError):
    """This machine cannot be several."""


class Switch(threading.Thread):
    """Carries frames between the cards of nodes."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="switch")
        self._cards: dict[int, tuple[str, int]] = {}  # node and network of each descriptor
        self._places: dict[bytes, int] = {}  # descriptor of each hardware address
        self._old = set[int]()  # descriptors of cards that go
        self._cuts: frozenset[frozenset[str]] = frozenset()
        self._late = deque[tuple[float, int, bytes]]()  # frames on their way: when they arrive, descriptor
        self.delay_s = 0.0  # seconds that a frame is on its way

    def cut(self, pairs: Iterable[frozenset[str]]) -> None:
        """Lose every frame between these pairs of nodes from now on, in silence, and between no others."""
        self._cuts = frozenset(pairs)

    def add(self, node: str, network: int, device: str) -> None:
        """Make a TAP device of this process's network, whose frames belong to a node."""
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise LabError(
                f"open('/dev/net/tun'): {error.strerror}; {_RIGHTS} On a host: modprobe tun."
            ) from error
        try:
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
        except OSError as error:
            os.close(tap)
            raise LabError(f"ioctl(TUNSETIFF): {error.strerror}; {_RIGHTS}") from error
        self._cards[tap] = (node, network)

    def remove(self, node: str) -> None:
        """Take a dead node's cards away.

        Connections that its kernel still closes keep its network up, which resets connections of the node's
        successor, which has the same addresses.
        """
        self._old |= {tap for tap, (name, _) in self._cards.items() if name == node}
        while self._old and self.is_alive():
            time.sleep(0.01)

    def run(self) -> None:
        while True:
            for tap in list(self._old):
                self._remove(tap)
                self._old.remove(tap)
            wait_s = self._late[0][0] - time.monotonic() if self._late else 0.2
            for tap in select.select(list(self._cards), [], [], min(max(wait_s, 0.0), 0.2))[0]:
                self._drain(tap)
            while self._late and self._late[0][0] <= time.monotonic():
                self._deliver(*self._late.popleft()[1:])

    def _drain(self, tap: int) -> None:
        for _ in range(64):  # then the other cards' turn
            try:
                frame = os.read(tap, _FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:  # not up yet
                    return
                self._remove(tap)  # it went with its node
                return
            self._carry(tap, frame)

    def _remove(self, tap: int) -> None:
        if self._cards.pop(tap, None) is not None:
            self._places = {address: place for address, place in self._places.items() if place != tap}
            os.close(tap)

    def _carry(self, tap: int, frame: bytes) -> None:
        target, source = frame[:6], frame[6:12]
        self._places[source] = tap
        node, network = self._cards[tap]
        is_for_all = bool(target[0] & 1)
        place = None if is_for_all else self._places.get(target)
        for other, (name, its_network) in list(self._cards.items()):
            is_meant = other == place if place is not None else other != tap and its_network == network
            if is_meant and frozenset((node, name)) not in self._cuts:
                if self.delay_s or self._late:
                    self._late.append((time.monotonic() + self.delay_s, other, frame))
                else:
                    self._deliver(other, frame)

    def _deliver(self, tap: int, frame: bytes) -> None:
        if tap in self._cards:
            with suppress(OSError):  # down, full, or gone
                os.write(tap, frame)


@dataclass
class Node:
    """A machine: its first process, and the `unshare` that started it."""

    name: str
    address: str
    init: int  # as seen from here
    launcher: subprocess.Popen[bytes]

    @property
    def prefix(self) -> list[str]:
        """What stands before a command to run it on this node, in this process's working folder."""
        return ["nsenter", f"--target={self.init}", "--all", "--", "env", f"--chdir={Path.cwd()}"]

    @property
    def is_alive(self) -> bool:
        return self.launcher.poll() is None

    def start(self, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a process, which ends with the node; both outputs are appended to the log."""
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self.prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )

    def ask(self, *command: str) -> str:
        """Output of a command, which must succeed."""
        done = subprocess.run(
            [*self.prefix, *command], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise LabError(f"{self.name}: {' '.join(command)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def write_hosts(self, lines: Iterable[str]) -> None:
        """Replace the node's /etc/hosts."""
        Path(f"/proc/{self.init}/root/etc/hosts").write_text("".join(f"{line}\n" for line in lines))

    def kill(self) -> None:
        """End all processes at once. The kernel closes their connections, which others see unless cut off."""
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.launcher.wait()


@dataclass
class Lab:
    """The nodes and the switch between them."""

    folder: Path  # of hosts and logs
    shared: tuple[
        Path, ...
    ]  # folders that all nodes see, even below /tmp; /dev/shm and /run are each node's own
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    prefixes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """What stands before a command to run it on a node, by the node's name."""
    _switch: Switch = field(default_factory=Switch)
    _names: tuple[str, ...] = ()

    @contextmanager
    def running(self, *names: str) -> Iterator["Lab"]:
        """Start the nodes, and end all their processes with the block.

        Raises:
            LabError: The call that this machine refuses, and what to do.
        """
        self._names = names
        _leave_network()
        try:
            for name in names:
                self.start(name)
            self._switch.start()
            yield self
        finally:
            for node in self.nodes.values():
                node.kill()

    def start(self, name: str) -> None:
        """Start a node, or start it again after it was killed."""
        number = self._names.index(name) + 1
        self._switch.remove(name)
        self.nodes[name] = node = self._boot(name, number)
        self.prefixes[name] = node.prefix
        for card, (network, network_v6) in enumerate(zip(NETWORKS, NETWORKS_V6, strict=True)):
            device, inside = f"{name}.{card}", f"eth{card}"
            self._switch.add(name, card, device)
            _run("ip", "link", "set", device, "address", f"02:00:00:00:{card:02x}:{number:02x}")
            _run("ip", "link", "set", device, "netns", str(node.init), "name", inside)
            node.ask("ip", "address", "add", f"{network}.{number}/24", "dev", inside)
            node.ask("ip", "-6", "address", "add", f"{network_v6}{number}/64", "dev", inside, "nodad")
            node.ask("ip", "link", "set", inside, "up")

    def hosts(self) -> list[str]:
        """Lines of /etc/hosts: each node by its name, and by NAME-v6."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for number, name in enumerate(self._names, 1):
            lines += [f"{NETWORKS[0]}.{number} {name}", f"{NETWORKS_V6[0]}{number} {name}-v6"]
        return lines

    def cut(self, one: str, *others: str) -> None:
        """Lose every frame between a node and the others (all by default), both ways, in silence."""
        self._switch.cut(frozenset((one, other)) for other in others or set(self.nodes) - {one})

    def mend(self) -> None:
        """Carry all frames again."""
        self._switch.cut(())

    def delay(self, seconds: float) -> None:
        """Let each frame take so long from now on."""
        self._switch.delay_s = seconds

    def repair(self) -> None:
        """Connect all nodes without delay, by their names, and start the dead ones."""
        self.mend()
        self.delay(0)
        for name, node in list(self.nodes.items()):
            if not node.is_alive:
                self.start(name)
            self.nodes[name].write_hosts(self.hosts())

    def _boot(self, name: str, number: int) -> Node:
        hosts, log = self.folder / f"{name}.hosts", self.folder / f"{name}.log"
        hosts.write_text("".join(f"{line}\n" for line in self.hosts()))
        below = [str(path) for path in self.shared if Path("/tmp") in path.parents]
        unshare = [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        # The node ends with this process, however that ends.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            *unshare,
            "bash",
            "-c",
            _INIT,
            "init",
            name,
            str(hosts),
            *below,
        ]
        with log.open("wb") as out:
            launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
        deadline = time.monotonic() + _START_TIMEOUT_S
        while launcher.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                for child in children.read_text().split():
                    if Path(f"/proc/{child}/root/run/ready").exists():
                        return Node(name, f"{NETWORKS[0]}.{number}", int(child), launcher)
            time.sleep(0.01)
        launcher.kill()
        launcher.wait()
        raise LabError(f"node {name} did not start: {log.read_text().strip() or 'no word'}; {_RIGHTS}")


def shared_folders(*more: Path) -> tuple[Path, ...]:
    """What all nodes must see to run this repository: itself, the interpreter, and more."""
    folders = (Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix), *more)
    return tuple(sorted({folder.resolve() for folder in folders}))


def _leave_network() -> None:
    """Move this process to a separate network, so that devices never appear in the machine's."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        raise LabError(f"found no {', '.join(missing)}; expected util-linux and iproute2. Install them.")
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise LabError(f"unshare(CLONE_NEWNET): {os.strerror(ctypes.get_errno())}; {_RIGHTS}")
    _run("ip", "link", "set", "lo", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}; {_RIGHTS}")
