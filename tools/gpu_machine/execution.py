"""Runs one step: a program in a session of its own, its output in a file; stops what it has left running."""

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

GRACE_S = 15.0  # between SIGTERM and SIGKILL: torchrun ends its ranks meanwhile
MARK = "MEGATRON_DPPO_GPU_MACHINE_STEP"  # in the environment of all that a step starts, whoever its parent is
MAX_LINES = 60

Outcome = Literal["passed", "failed", "timed out", "left out"]


@dataclass(frozen=True)
class Result:
    """How a step ended."""

    name: str
    outcome: Outcome
    seconds: float
    limit_s: float
    exit_status: int | None  # of the program that ended by itself
    found: tuple[str, ...]  # lines of its output, or why it was left out

    @property
    def ended(self) -> str:
        """What the table's column says: an exit status, or what happened instead of one."""
        return f"exit {self.exit_status}" if self.exit_status is not None else self.outcome


def run_step(
    step: Step, root: Path, log: Path, environment: dict[str, str], *, grace_s: float | None = None
) -> Result:
    """Run a step to its end or its limit, and stop whatever it has left running.

    Args:
        step: The program; it runs in `root`.
        root: The repository.
        log: Where its output goes.
        environment: That of the program, but for what the step adds.
        grace_s: Seconds that processes have to end after SIGTERM; GRACE_S where it is none.
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
    """Terminate, then kill, what is alive of a program and of all that it started; return how many."""
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
    """Processes with the mark in their environment, or of the program's session, that have not ended."""
    process.poll()
    return [one for one in psutil.process_iter() if _is_of(one, process.pid, mark)]


def _is_of(one: psutil.Process, session: int, mark: str) -> bool:
    try:
        is_ours = os.getsid(one.pid) == session or one.environ().get(MARK) == mark
        return is_ours and one.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # it has ended, or is another user's
        return False


def _signal(one: psutil.Process, name: Literal["terminate", "kill"]) -> None:
    """Signal a process; psutil signals none that only has the number of one that ended."""
    try:
        getattr(one, name)()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return


def _found(step: Step, lines: list[str], *, has_passed: bool) -> tuple[str, ...]:
    """The lines that say what was found; of a program that failed without one, its last words."""
    matching = [line.strip(" =") for line in lines if re.search(step.finding, line)][-MAX_LINES:]
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if matching or has_passed:
        return tuple(matching)
    return (last or "no output",)
