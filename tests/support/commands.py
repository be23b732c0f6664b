"""Runs `python ...` in a process forked from the server of `ranks`, which has imported PyTorch and Megatron.

Importing them takes longer than most of these commands do. Tests that start a command with
imports, start it with `subprocess`.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.measured import measure_process
from tests.support.ranks import FORKS, LIMIT_S, ended, environments


def python(
    *arguments: object, cwd: Path | None = None, processes: int = 1, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """What `python arguments` prints, and its exit status: of a file, or of `-m` and a module.

    Several processes get ranks as under torchrun. The result is their outputs, one after another, and the
    first exit status that is not 0.
    """
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        streams = [[Path(folder, f"{name}{rank}") for name in ("out", "err")] for rank in range(processes)]
        each = environments(processes) if processes > 1 else [dict(os.environ)]
        started = [
            FORKS.Process(target=_run, args=(words, environment, cwd or Path.cwd(), paths, own_path()))
            for environment, paths in zip(each, streams, strict=True)
        ]
        for process in started:
            process.start()
        statuses = ended(started, timeout_s)
        if None in statuses:
            raise subprocess.TimeoutExpired(words, timeout_s)
        stdout, stderr = ("".join(path.read_text() for path in paths) for paths in zip(*streams, strict=True))
    return subprocess.CompletedProcess(words, next(filter(None, statuses), 0), stdout, stderr)


@cache
def own_path() -> list[str]:
    """Where a Python that is started by itself looks for modules, without the tests' folders."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _run(
    words: list[str], environment: dict[str, str], cwd: Path, streams: list[Path], path: list[str]
) -> None:
    gc.freeze()
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    measure_process()
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv, sys.path[:] = words[1:], [str(cwd), *path]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = words, [str(Path(words[0]).resolve().parent), *path]
        runpy.run_path(words[0], run_name="__main__")
