"""Runs persistent groups of ranks that take turns, to interleave layouts on one and on several processes.

A group starts once. Its ranks then wait for the name and arguments of a function of `jobs.py`, run it together,
and rank 0 returns the result. A waiting group uses no CPU time.
"""

import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import typer

from tools.benchmarks.benchmarking import ROOT, free_port


class Ranks:
    """A group of ranks with one thread each, on this machine's loopback. Leaving the context ends them."""

    def __init__(self, num_processes: int, logs: Path) -> None:
        """Start the processes with their output in `logs`, and return before they are ready."""
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        shared["WORLD_SIZE"] = str(num_processes)
        if sys.platform == "linux":
            shared["GLOO_SOCKET_IFNAME"] = "lo"
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"ranks_{num_processes}_{rank}.log" for rank in range(num_processes)]
        self._processes: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(self._logs):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tools.benchmarks.ranks"],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else file,
                    stderr=file,
                    env=environment,
                    text=True,
                )
            self._processes.append(process)

    def call(self, function: str, **arguments: Any) -> Any:
        """Run `<function>(runtime, **arguments)` of `jobs.py` on every rank, and return rank 0's result.

        Raises:
            typer.Exit: A rank has ended. The end of its output is shown.
        """
        job = json.dumps({"function": function, "arguments": arguments}) + "\n"
        with suppress(BrokenPipeError):  # a rank has ended: the missing reply below reports it
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(job)
                process.stdin.flush()
        answers = self._processes[0].stdout
        assert answers is not None
        answer = answers.readline()
        if not answer:
            ends = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in self._logs)
            typer.echo(
                f"{function}({arguments}): a rank has ended. The ends of their output:\n{ends}", err=True
            )
            raise typer.Exit(1)
        return json.loads(answer)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if error is not None:
                process.terminate()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has already ended without reading a job
                process.stdin.close()
        for process in self._processes:
            process.wait()


def serve() -> None:
    """Run the jobs from stdin as one rank until stdin ends. Only results are written to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    from megatron_dppo.runtime import process as runtime

    runtime.quiet_library_warnings()
    jobs: Any = importlib.import_module("tools.benchmarks.jobs")
    this = runtime.start(join_timeout_s=120)
    for line in sys.stdin:
        job = json.loads(line)
        result = getattr(jobs, job["function"])(this, **job["arguments"])
        if this.is_main:
            answers.write(json.dumps(result) + "\n")
            answers.flush()
    runtime.stop()


if __name__ == "__main__":
    serve()
