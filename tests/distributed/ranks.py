"""Runs a function on several gloo ranks, each a fresh process, and returns what each gave back."""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORKER = """
import os, pickle, sys, warnings
warnings.filterwarnings("ignore")
with open(sys.argv[1], "rb") as file:
    module, name, arguments = pickle.load(file)
sys.path[:0] = module[0]
import importlib
from megatron_dppo import runtime
this = runtime.start()
result = getattr(importlib.import_module(module[1]), name)(this, *arguments)
with open(sys.argv[2] + str(this.rank), "wb") as file:
    pickle.dump(result, file)
runtime.stop()
sys.stdout.flush()
os._exit(0)  # once in many hundred ends, a thread of PyTorch's aborts the interpreter's own way out
"""


def run_ranks(
    function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any, timeout_s: float = 300
) -> list[Any]:
    """`function(runtime, *arguments)` on `world_size` processes; the results in rank order.

    `function` must stand at the top of a module in tests/distributed, and its arguments must pickle.
    """
    file = sys.modules[function.__module__].__file__
    assert file is not None
    job = folder / "job.pickle"
    folders = [str(Path(file).parent), str(Path(file).parents[1] / "unit")]
    module = (folders, function.__module__.rpartition(".")[2])
    job.write_bytes(pickle.dumps((module, function.__name__, arguments)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    processes = []
    for rank in range(world_size):
        log = (folder / f"rank{rank}.log").open("w")
        command = [sys.executable, "-c", _WORKER, str(job), str(folder / "result")]
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(world_size))
    assert not any(codes), f"ranks ended with {codes}:\n{logs}"
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]
