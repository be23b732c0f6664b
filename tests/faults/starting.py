"""Starts the ranks of a real run with faults in them, one process per rank.

The processes are forked from one that has imported PyTorch and Megatron, and has done nothing else, as
`support/ranks.py` does it: importing them takes a rank longer than most runs here. Nothing restarts or ends
a rank, and its exit status is the process's own.
"""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults import rank as faulty_rank
from tests.support.measured import measure_process
from tests.support.ranks import FORKS, environments

_ROOT = Path(__file__).parents[2]


def start_ranks(num_ranks: int, config: Path, faults: Sequence[dict[str, Any]], log: Path) -> list[BaseProcess]:
    """Start `megatron-dppo train` on so many ranks, as a launcher would.

    Args:
        num_ranks: How many.
        config: The run's TOML file.
        faults: Faults as described in `rank.py`.
        log: Gets what all ranks print.
    """
    processes: list[BaseProcess] = []
    for environment in environments(num_ranks):
        process = FORKS.Process(target=_train, args=(environment, str(config), faults, str(log)))
        process.start()
        processes.append(process)
    return processes


def _train(environment: dict[str, str], config: str, faults: Sequence[dict[str, Any]], log: str) -> None:
    """One rank's process."""
    gc.freeze()  # looking for garbage in what was imported before the fork takes half a second each time
    with Path(log).open("a") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    measure_process()
    for number in (signal.SIGINT, signal.SIGHUP):  # tests in the background of a shell ignore them
        signal.signal(number, signal.SIG_DFL)
    os.chdir(_ROOT)
    faulty_rank.run(config, faults)
    sys.stdout.flush()
