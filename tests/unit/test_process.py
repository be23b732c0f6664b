"""The process group: joined, and left with nothing of it alive."""

import subprocess
import sys

LEAVE = """
import time
from contextlib import suppress
from pathlib import Path

from megatron_dppo.runtime import process

process.start()
import torch.distributed.checkpoint  # as commands do: Megatron is imported after the process group exists

process.stop()


def threads_of_gloo():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return [name for name in names if "gloo" in name]


deadline = time.monotonic() + 20
while threads_of_gloo() and time.monotonic() < deadline:
    time.sleep(0.1)
print(threads_of_gloo())
"""


def test_gloos_threads_end_with_the_process_group() -> None:
    """What lives on is torn down while Python exits, which now and then ends in `terminate called`, rc -6."""
    ended = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
