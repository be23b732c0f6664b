"""The process group: joined, and left with nothing of it alive."""

import subprocess
import sys

LEAVE = """
import threading
from pathlib import Path

from megatron_dppo.runtime import process

process.start()
import torch.distributed.checkpoint  # as commands do: Megatron is imported after the process group exists

process.stop()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


def test_gloos_threads_end_with_the_process_group() -> None:
    """What lives on is torn down while Python exits, which now and then ends in `terminate called`, rc -6."""
    ended = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
