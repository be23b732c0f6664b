"""The lab reports a missing permission, and leaves nothing on the machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.lab import Lab
from tests.support.jobs import ROOT
from tests.support.processes import wait_until

_OPEN = """
import sys, time
from pathlib import Path
from tests.nodes.lab import Lab, shared_folders
with Lab(Path(sys.argv[1]), shared_folders(Path(sys.argv[1]))).running("a", "b") as lab:
    print(*(node.init for node in lab.nodes.values()), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("right", "call"),
    [
        ("sys_admin", "unshare(CLONE_NEWNET): Operation not permitted"),
        ("net_admin", "ip link set lo up: RTNETLINK answers: Operation not permitted"),
    ],
)
def test_the_call_that_is_refused_is_named(tmp_path: Path, right: str, call: str) -> None:
    without = ["setpriv", f"--bounding-set=-{right}", f"--inh-caps=-{right}"]
    command = [*without, sys.executable, "-c", _OPEN, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert f"LabError: {call}; expected the right" in ended.stderr


def test_nothing_is_left_of_a_lab_that_is_killed(tmp_path: Path) -> None:
    lab = subprocess.Popen(
        [sys.executable, "-c", _OPEN, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert lab.stdout is not None, "a pipe"
    nodes = [int(node) for node in lab.stdout.readline().split()]
    assert len(nodes) == 2
    lab.send_signal(signal.SIGKILL)
    lab.wait()
    wait_until(lambda: not any(Path(f"/proc/{node}").exists() for node in nodes), 120)


def test_a_delay_holds_each_frame_up(lab: Lab) -> None:
    """A refused connection takes one round trip."""
    connect = (
        "import socket, time; began = time.monotonic(); "
        "socket.socket().connect_ex(('n0', 9)); print(time.monotonic() - began)"
    )
    lab.delay(0.2)
    try:
        assert float(lab.nodes["n1"].ask(sys.executable, "-c", connect)) >= 0.4
    finally:
        lab.delay(0)


def test_nodes_share_a_disk_and_nothing_else(lab: Lab, tmp_path: Path) -> None:
    n0, n1 = lab.nodes["n0"], lab.nodes["n1"]
    n0.ask("touch", f"{tmp_path}/common", "/tmp/own", "/dev/shm/own", "/run/own")
    assert n1.ask("ls", str(tmp_path)) == "common\n"
    assert "own" not in n1.ask("ls", "/tmp", "/dev/shm", "/run")
    assert (n0.ask("hostname"), n1.ask("hostname")) == ("n0\n", "n1\n")
    assert str(os.getpid()) not in n1.ask("ls", "/proc").split()
    for cut, timeout_s, error in ((False, 120, "ConnectionRefusedError"), (True, 1, "TimeoutError")):
        if cut:
            lab.cut("n0", "n1")
        connect = f"import socket; socket.create_connection(('n0', 9), {timeout_s})"
        with pytest.raises(RuntimeError, match=error):
            n1.ask(sys.executable, "-c", connect)
