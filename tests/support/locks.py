"""Processes that hold a run folder, if wanted under the name of another host."""

import subprocess
import sys
import time
from pathlib import Path

_HOLD = """
import socket, sys, time
from pathlib import Path
folder, host, hold_s = sys.argv[1:]
if host:
    socket.gethostname = lambda: host
from megatron_dppo.run_folder.lock import locked
with locked(Path(folder), beat_s=0.1, silent_s=1.0, patience_s=4.0):
    print("held", flush=True)
    time.sleep(float(hold_s))
"""


def begin_to_hold(folder: Path, host: str = "", hold_s: float = 60.0) -> subprocess.Popen[str]:
    """Start a process that holds the folder as soon as it is free; its output is then "held"."""
    command = [sys.executable, "-c", _HOLD, str(folder), host, str(hold_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hold_in_another_process(folder: Path, host: str = "", hold_s: float = 60.0) -> subprocess.Popen[str]:
    """Return a process that holds the folder, and has shown signs of life."""
    process = begin_to_hold(folder, host, hold_s)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    time.sleep(0.3)
    return process
