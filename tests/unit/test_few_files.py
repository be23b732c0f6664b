"""Too few open files at each call of clients and pools: this machine is named, and nothing leaks."""

import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain

import pytest

from tests.support.few_files import MOST
from tests.support.sglang_stand_in import StandIn

WORKER = "raise the limits of this machine"
WORDS = {"client": "this machine: found", "rewards": WORKER, "decoding": WORKER}


@pytest.mark.parametrize("which", WORDS)
def test_any_call_may_hit_the_open_file_limit(which: str) -> None:
    """From none that is left to more than it needs: all fails at first, and nothing at last."""
    with ExitStack() as stack:
        urls = [stack.enter_context(StandIn().running()).url for _ in range(3 * (which == "client"))]
        command = [sys.executable, "-m", "tests.support.few_files", which, *urls]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1500)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == MOST
    failures = [[each for each in of_calls if each] for of_calls, *_ in rows]
    assert failures[0] and not failures[-1]
    for each in chain.from_iterable(failures):
        assert WORDS[which] in each
        assert each.partition(":")[0] in ("ShortageError", "RewardError", "RolloutError")
    works, num_files, num_processes = zip(*(rest for _, *rest in rows), strict=True)
    assert all(works)
    assert max(num_files) - min(num_files) <= 2 and max(num_processes) <= 1  # one process may still end
