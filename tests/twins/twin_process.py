"""`megatron-dppo train` in a process forked from one that has imported everything, which takes seconds."""

import os
import sys
from multiprocessing import get_context
from pathlib import Path

import megatron_dppo.train  # noqa: F401  what a run imports, imported once
from megatron_dppo.cli import app

TIMEOUT_S = 120


def train(arguments: list[str], folder: Path, log: Path) -> int:
    """The exit status of `megatron-dppo train`, started in `folder`; what it prints goes to `log`."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_train, args=(arguments, folder, log))
    process.start()
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _train(arguments: list[str], folder: Path, log: Path) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    app(["train", *arguments])
