"""The process group: joined, and left with nothing of it alive."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("32", "32")])
def test_collectives_of_a_layer_are_launched_before_what_hides_them(given: str | None, expected: str) -> None:
    """As Megatron asks for with sequence parallelism; CUDA reads the variable when it starts."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environment = {key: value for key, value in os.environ.items() if key != name}
    look = f"import os; from megatron_dppo.runtime import process; process.start(); print(os.environ[{name!r}])"
    given_one = {} if given is None else {name: given}
    ended = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=120, env=environment | given_one
    )
    assert (ended.returncode, ended.stdout) == (0, f"{expected}\n"), ended.stderr
