"""Runs a function on several gloo ranks, one process per rank, and returns the result of each.

The processes are forked from one that has imported PyTorch and Megatron, and has done nothing else: importing
them takes a rank longer than most tests.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.support.measured import measure_process

LIMIT_S = 1500.0  # of ranks that take a minute on an idle machine; a test has 1800 s
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "megatron_dppo.train"])
_FIRST_PORT = 16_000 + 8_000 * (os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0")
_PORTS = (_FIRST_PORT + number % 8_000 for number in itertools.count(os.getpid()))


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *arguments: Any,
    timeout_s: float = LIMIT_S,
    is_fresh: bool = False,
    exit_code: int = 0,
) -> list[Any]:
    """`function(runtime, *arguments)` on `world_size` processes; the results in rank order.

    `function` must stand at the top of a module, and its arguments must pickle. Where `is_fresh`, the processes
    are new ones that have not imported Megatron yet. Where they are to end with another `exit_code` than 0,
    there are no results.
    """
    must_be_fresh = is_fresh or torch.cuda.is_available()  # CUDA does not survive a fork
    context = multiprocessing.get_context("spawn") if must_be_fresh else FORKS
    processes: list[BaseProcess] = []
    for rank, environment in enumerate(environments(world_size)):
        process = context.Process(target=_run_rank, args=(environment, folder, rank, function, arguments))
        process.start()
        processes.append(process)
    codes = ended(processes, timeout_s)
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(world_size))
    said = f"ranks ended with {codes} (None: not within {timeout_s} s), expected {exit_code}:\n{logs}"
    assert codes == [exit_code] * world_size, said
    if exit_code:
        return []
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def ended(processes: Sequence[BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for all of them, kill those that take longer, and return exit codes: none for a killed one."""
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def environments(world_size: int) -> list[dict[str, str]]:
    """What torchrun would set for each rank, in this process's environment."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ranks = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size))
    return [os.environ | shared | rank | {"OMP_NUM_THREADS": "1"} for rank in ranks]


def free_port() -> int:
    """A port that nobody else takes before rank 0 listens there.

    The system gives out none of these by itself, and each of pytest's workers has its own.
    """
    while True:
        port = next(_PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _run_rank(
    environment: dict[str, str],
    folder: Path,
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """One rank's process."""
    gc.freeze()  # looking for garbage in what was imported before the fork takes half a second each time
    with (folder / f"rank{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    end_measuring = measure_process()
    warnings.filterwarnings("ignore")
    from megatron_dppo.runtime import process as runtime

    torch.set_num_threads(1)
    this = runtime.start()
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(this, *arguments)))
    runtime.stop()
    end_measuring()
    sys.stdout.flush()
    os._exit(0)  # once in many hundred ends, a thread of PyTorch's aborts the interpreter's own way out
