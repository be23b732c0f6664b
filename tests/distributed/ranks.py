"""Runs a function on several gloo ranks, each a process of its own, and returns what each gave back.

The processes are forked from one that has imported PyTorch and Megatron, and has done nothing else: importing
them takes a rank longer than most tests.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", "megatron_dppo.train"])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    folder: Path,
    *arguments: Any,
    timeout_s: float = 300,
    is_fresh: bool = False,
) -> list[Any]:
    """`function(runtime, *arguments)` on `world_size` processes; the results in rank order.

    `function` must stand at the top of a module, and its arguments must pickle. Where `is_fresh`, the processes
    are new ones that have not imported Megatron yet.
    """
    must_be_fresh = is_fresh or torch.cuda.is_available()  # CUDA does not survive a fork
    context = multiprocessing.get_context("spawn") if must_be_fresh else _FORKS
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    processes: list[BaseProcess] = []
    for rank in range(world_size):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        process = context.Process(target=_run_rank, args=(environment, folder, rank, function, arguments))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(world_size))
    assert codes == [0] * world_size, f"ranks ended with {codes} (None: not within {timeout_s} s):\n{logs}"
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def _run_rank(
    environment: dict[str, str],
    folder: Path,
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """One rank's process."""
    with (folder / f"rank{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    warnings.filterwarnings("ignore")
    from megatron_dppo.runtime import process as runtime

    torch.set_num_threads(1)
    this = runtime.start()
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(this, *arguments)))
    runtime.stop()
    sys.stdout.flush()
    os._exit(0)  # once in many hundred ends, a thread of PyTorch's aborts the interpreter's own way out
