"""Runs a step as a program in its own session, logs its output to a file, and stops all leftover processes."""

import os
import re
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tools.gpu_machine.steps import Step

GRACE_S = 15.0  # seconds between SIGTERM and SIGKILL, in which torchrun ends its ranks
MARK = "MEGATRON_DPPO_GPU_MACHINE_STEP"  # in the environment of every process that a step starts
MAX_LINES = 60

Outcome = Literal["passed", "failed", "timed out", "left out"]


@dataclass(frozen=True)
class Result:
    """How a step ended."""

    name: str
    outcome: Outcome
    seconds: float
    limit_s: float
    exit_status: int | None  # None if the program did not end by itself
    found: tuple[str, ...]  # lines of its output, or the reason why it was left out

    @property
    def ended(self) -> str:
        """Text for the table: the exit status, or the outcome if there is none."""
        return f"exit {self.exit_status}" if self.exit_status is not None else self.outcome


def run_step(
    step: Step, root: Path, log: Path, environment: dict[str, str], *, grace_s: float | None = None
) -> Result:
    """Run a step to its end or its limit, and stop all processes that it has left running.

    Args:
        step: Program to run in `root`.
        root: Folder of the repository.
        log: File for the program's output.
        environment: Environment of the program, to which the step adds its own variables.
        grace_s: Seconds that processes have to end after SIGTERM. `None` means GRACE_S.
    """
    started = time.perf_counter()
    mark = uuid.uuid4().hex
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {' '.join(step.words)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                step.words,
                cwd=root,
                env=environment | step.environment | {MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Result(step.name, "failed", 0.0, step.limit_s, None, (f"does not start: {error}",))
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(step.limit_s)
            status, seconds = process.poll(), time.perf_counter() - started
        finally:
            num_left = _stop(process, mark, GRACE_S if grace_s is None else grace_s)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    found = _found(step, lines, has_passed=status == 0)
    if status is None:
        found = (*found, f"stopped after {step.limit_s:g} s, with {num_left} processes")
        return Result(step.name, "timed out", seconds, step.limit_s, None, found)
    if status and step.cannot and any(re.search(step.cannot, line) for line in lines):
        return Result(step.name, "left out", seconds, step.limit_s, None, (*found, "not supported here"))
    if num_left:
        found = (*found, f"{num_left} processes were left running, and stopped")
    return Result(step.name, "failed" if status else "passed", seconds, step.limit_s, status, found)


def _stop(process: subprocess.Popen[bytes], mark: str, grace_s: float) -> int:
    """Terminate, then kill a program and all processes that it started. Return how many were alive."""
    alive = _alive(process, mark)
    num_alive = len(alive)
    for one in alive:
        _signal(one, "terminate")
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.2)
        alive = _alive(process, mark)
    while alive:
        for one in alive:
            _signal(one, "kill")
        psutil.wait_procs(alive, timeout=1.0)
        alive = _alive(process, mark)
    process.wait()
    return num_alive


def _alive(process: subprocess.Popen[bytes], mark: str) -> list[psutil.Process]:
    """Return the live processes of the program's session, or with the mark in their environment."""
    process.poll()
    return [one for one in psutil.process_iter() if _is_of(one, process.pid, mark)]


def _is_of(one: psutil.Process, session: int, mark: str) -> bool:
    try:
        is_ours = os.getsid(one.pid) == session or one.environ().get(MARK) == mark
        return is_ours and one.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


def _signal(one: psutil.Process, name: Literal["terminate", "kill"]) -> None:
    """Signal a process. psutil never signals another process that has the reused id of an ended one."""
    try:
        getattr(one, name)()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return


def _found(step: Step, lines: list[str], *, has_passed: bool) -> tuple[str, ...]:
    """Return the output lines that match the finding, or the last line if a program failed without any."""
    matching = [line.strip(" =") for line in lines if re.search(step.finding, line)][-MAX_LINES:]
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if matching or has_passed:
        return tuple(matching)
    return (last or "no output",)
