"""Runs a step as a program, logs its output to a file, and stops all processes that it leaves running."""

import re
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from tools.gpu_machine.steps import Step

GRACE_S = 15.0  # seconds between SIGTERM and SIGKILL, in which torchrun ends its ranks
MARK = "MEGATRON_DPPO_GPU_MACHINE_STEP"  # in the environment of every process that a step starts
MAX_LINES = 60


@dataclass(frozen=True)
class Result:
    """How a step ended."""

    name: str
    outcome: Literal["passed", "failed", "timed out", "left out"]
    seconds: float
    limit_s: float
    exit_status: int | None  # None if the program did not end by itself
    found: tuple[str, ...]  # output lines, or the reason why the program was left out


def run_step(
    step: Step, root: Path, log: Path, environment: dict[str, str], *, grace_s: float | None = None
) -> Result:
    """Run a step in `root` to its end or its limit, and stop all processes that it has left running.

    Processes get `grace_s` seconds (`None` means GRACE_S) to end after SIGTERM.
    """
    started, mark = time.perf_counter(), uuid.uuid4().hex
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {' '.join(step.words)}\n")
        file.flush()
        environment = environment | step.environment | {MARK: mark}
        output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(step.words, cwd=root, env=environment, start_new_session=True, **output)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(step.limit_s)
            status, seconds = process.poll(), time.perf_counter() - started
        finally:
            num_left = _stop(process, mark, GRACE_S if grace_s is None else grace_s)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    found = [line.strip(" =") for line in lines if re.search(step.finding, line)][-MAX_LINES:]
    if status != 0 and not found:
        found = [next((line.strip() for line in reversed(lines) if line.strip()), "no output")]
    outcome = "passed" if status == 0 else "failed"
    if status is None:
        outcome = "timed out"
        found.append(f"stopped after {step.limit_s:g} s, with {num_left} processes")
    elif status and step.cannot and any(re.search(step.cannot, line) for line in lines):
        outcome, status = "left out", None
        found.append("not supported here")
    elif num_left:
        found.append(f"{num_left} processes were left running, and stopped")
    return Result(step.name, outcome, seconds, step.limit_s, status, tuple(found))


def _stop(process: subprocess.Popen[Any], mark: str, grace_s: float) -> int:
    """Terminate, then kill all processes with the mark in their environment. Return how many were alive."""
    alive = _alive(process, mark)
    num_alive, deadline = len(alive), time.monotonic() + grace_s
    for one in alive:
        with suppress(psutil.Error):  # it has ended
            one.terminate()
    while alive:
        psutil.wait_procs(alive, timeout=0.2)
        alive = _alive(process, mark)
        for one in alive if time.monotonic() >= deadline else ():
            with suppress(psutil.Error):
                one.kill()
    process.wait()
    return num_alive


def _alive(process: subprocess.Popen[Any], mark: str) -> list[psutil.Process]:
    process.poll()
    everyone = psutil.process_iter(["environ", "status"])
    marked = (one for one in everyone if (one.info["environ"] or {}).get(MARK) == mark)
    return [one for one in marked if one.info["status"] != psutil.STATUS_ZOMBIE]
