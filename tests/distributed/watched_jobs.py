"""Jobs that fail in every way there is; run as a script, it starts them for test_failure_detection.py.

The script imports what ranks need and forks each rank from itself, so that a job starts in an instant. A rank
ends as any process does.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_dppo.errors import ConfigError, ServerError, TrainingError
from megatron_dppo.failure_detection import watching
from megatron_dppo.runtime.process import Runtime, Stopwatch, start

PATIENCE_S = 6.0


def note_fault() -> None:
    Path(os.environ["FAULT"]).touch()


def fail(error: BaseException) -> NoReturn:
    time.sleep(0.5)  # the others are in their collective by now
    note_fault()
    raise error


@contextmanager
def in_train(runtime: Runtime) -> Iterator[None]:
    runtime.progress.rollout, runtime.progress.step = 3, 12
    with Stopwatch(runtime).time("train"):
        yield


def compute(seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def rank_0_raises(runtime: Runtime) -> None:
    with in_train(runtime):
        fail(ValueError("no such thing")) if runtime.rank == 0 else runtime.barrier()


def rank_1_raises(runtime: Runtime) -> None:
    with in_train(runtime):
        fail(ValueError("no such thing")) if runtime.rank == 1 else runtime.barrier()


def rank_1_raises_after_losing_rank_0(runtime: Runtime) -> None:
    """The error of rank 1 comes with a secondary one of rank 0, which comes first."""
    if runtime.rank == 0:
        note_fault()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.3)
    raise ValueError("no such thing")


def rank_1_raises_while_rank_0_computes(runtime: Runtime) -> None:
    fail(ValueError("no such thing")) if runtime.rank == 1 else compute()


def user_error_on_rank_1(runtime: Runtime) -> None:
    fail(
        TrainingError("the loss is not finite. Lower optimizer.lr.")
    ) if runtime.rank == 1 else runtime.barrier()


def server_error_on_rank_1(runtime: Runtime) -> None:
    fail(ServerError("no server is left")) if runtime.rank == 1 else runtime.barrier()


class _Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def same_error_on_all(runtime: Runtime) -> None:
    def fail_on_main() -> None:
        fail(ConfigError("run.folder is in use"))

    runtime.on_main(fail_on_main)


def unpicklable_error_on_all(runtime: Runtime) -> None:
    def fail_on_main() -> None:
        fail(_Unpicklable(1, 2))

    runtime.on_main(fail_on_main)


def same_error_found_by_each(runtime: Runtime) -> None:
    note_fault()
    raise ConfigError("parallel.expert does not divide")


def _die(runtime: Runtime, rank: int, other: Callable[[], None]) -> None:
    runtime.progress.phase = f"of rank {runtime.rank}"
    if runtime.rank == rank:
        time.sleep(1.5)  # long enough for the progress to be heard of
        note_fault()
        os.kill(os.getpid(), signal.SIGKILL)
    other()


def rank_0_dies_in_collective(runtime: Runtime) -> None:
    _die(runtime, 0, runtime.barrier)


def rank_1_dies_in_collective(runtime: Runtime) -> None:
    _die(runtime, 1, runtime.barrier)


def rank_0_dies_while_computing(runtime: Runtime) -> None:
    _die(runtime, 0, compute)


def rank_1_dies_while_computing(runtime: Runtime) -> None:
    _die(runtime, 1, compute)


def rank_1_dies_leaving_a_child(runtime: Runtime) -> None:
    """A forked child holds copies of all the connections of its parent."""
    if runtime.rank == 1 and os.fork() == 0:
        time.sleep(5)
        os._exit(0)
    _die(runtime, 1, compute)


def rank_1_is_stopped(runtime: Runtime) -> None:
    with in_train(runtime):
        if runtime.rank == 1:
            time.sleep(1.0)
            note_fault()
            os.kill(os.getpid(), signal.SIGSTOP)
        runtime.barrier()


def rank_0_is_stopped(runtime: Runtime) -> None:
    if runtime.rank == 0:
        time.sleep(1.0)
        note_fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    runtime.barrier()


def rank_1_loops(runtime: Runtime) -> None:
    with in_train(runtime):
        if runtime.rank == 1:
            note_fault()
            compute()
        runtime.barrier()


def rank_0_loops(runtime: Runtime) -> None:
    if runtime.rank == 0:
        note_fault()
        compute()
    runtime.barrier()


def all_well(runtime: Runtime) -> None:
    """Rank 1 answers nobody for longer than any patience here; rank 0 waits in a collective meanwhile."""
    runtime.barrier()
    if runtime.rank == 1:
        ctypes.PyDLL(None).sleep(4)  # holds the interpreter lock
    runtime.barrier()
    if runtime.rank == 0:
        time.sleep(1.5)  # rank 1 leaves well before
    note_fault()


def all_leave_with_75(runtime: Runtime) -> None:
    runtime.barrier()
    time.sleep(runtime.rank)
    note_fault()
    raise SystemExit(75)


def rank_1_leaves_alone(runtime: Runtime) -> None:
    if runtime.rank == 1:
        fail(SystemExit(75))
    runtime.barrier()


def rank_1_fails_after_rank_0_is_done(runtime: Runtime) -> None:
    if runtime.rank == 1:
        time.sleep(1.0)
        note_fault()
        raise ValueError("no such thing")


def _start_jobs() -> None:
    """The starter: one job per line; answers with exit codes and the time."""
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in job["ranks"]:
            if (pid := os.fork()) == 0:
                return _be_rank(rank, port, job)
            pids.append(pid)
        codes, deadline = {}, time.monotonic() + 60
        while len(codes) < len(pids):
            if time.monotonic() > deadline:
                for pid in set(pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
            for pid in set(pids) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        print(json.dumps([[codes[pid] for pid in pids], time.time()]), flush=True)
    return None


def _be_rank(rank: int, port: int, job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["FAULT"] = str(folder / "fault")
    log, nothing = (
        os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        os.open(os.devnull, os.O_RDONLY),
    )
    for source, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, stream)
    runtime = start(timeout_s=job["timeout_s"])
    with watching(runtime, peer_timeout_s=job["peer_timeout_s"], patience_s=PATIENCE_S):
        globals()[job["body"]](runtime)


if __name__ == "__main__":
    _start_jobs()
