"""Processes that hold a run folder, if wanted under the name of another host."""

import json
import subprocess
import sys
from pathlib import Path

from megatron_dppo.run_folder.lock import LOCK
from tests.support.processes import wait_until

_HOLD = """
import socket, sys
from pathlib import Path
folder, host = sys.argv[1:]
if host:
    socket.gethostname = lambda: host
from megatron_dppo.run_folder.lock import locked
with locked(Path(folder), beat_s=0.1, silent_s=5.0, patience_s=12.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def begin_to_hold(folder: Path, host: str = "") -> subprocess.Popen[str]:
    """Start a process that holds the folder as soon as it is free, and prints "held"; see `release`."""
    command, pipe = [sys.executable, "-c", _HOLD, str(folder), host], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def hold_in_another_process(folder: Path, host: str = "") -> subprocess.Popen[str]:
    """Return a process that holds the folder, and has shown signs of life."""
    process = begin_to_hold(folder, host)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    wait_until(lambda: json.loads((folder / LOCK).read_text())["beat"] > 0, 60)
    return process


def release(process: subprocess.Popen[str]) -> None:
    """Let a process release its folder, and end."""
    assert process.stdin is not None
    process.stdin.close()
