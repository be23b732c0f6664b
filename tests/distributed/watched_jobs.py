"""Jobs that fail in every way there is; run as a program, it starts them for test_failure_detection.py.

The program imports what ranks need and forks each rank from itself, so that a job starts in an instant. A rank
ends as any process does. No rank is waited for by seconds: what must have happened before a fault is looked at.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import distributed_c10d

from megatron_dppo import failure_detection
from megatron_dppo.errors import ConfigError, ServerError, TrainingError
from megatron_dppo.failure_detection import watching
from megatron_dppo.failure_detection.link import state_of
from megatron_dppo.failure_detection.watch import Head, Member
from megatron_dppo.runtime.process import Runtime, Stopwatch, start
from tests.support.processes import wait_until
from tests.support.ranks import free_port

COLLECTIVE_S = 2.0  # of those that must time out
LIMIT_S = 300.0  # of a job; what must not time out has twice as long
_watches: list[Head | Member] = []  # of this rank


def note_fault() -> None:
    Path(os.environ["FAULT"]).write_text(str(os.getpid()))


def wait_for_fault(state: str = "") -> None:
    """Wait until another rank has noted its fault, and its process is in a state of ps, if one is given."""
    fault = Path(os.environ["FAULT"])
    wait_until(lambda: fault.exists() and state in (state_of(int(fault.read_text() or "0")), ""), LIMIT_S)


def tell_progress(runtime: Runtime) -> None:
    """Wait until this rank has sent its progress to the others."""
    (watch,) = _watches
    name = "_told_since" if isinstance(watch, Head) else "_sent_since"
    wait_until(lambda: getattr(watch, name) == runtime.progress.since, LIMIT_S)


def time_out_soon(runtime: Runtime) -> None:
    """Give the next collectives of this rank two seconds."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), runtime.control)


def fail(error: BaseException) -> NoReturn:
    time.sleep(0.5)  # the others are in their collective by now
    note_fault()
    raise error


@contextmanager
def in_train(runtime: Runtime) -> Iterator[None]:
    runtime.progress.rollout, runtime.progress.step = 3, 12
    with Stopwatch(runtime).time("train"):
        yield


def compute() -> None:
    while True:
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
    wait_for_fault()
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
        tell_progress(runtime)
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
    """A forked child holds copies of all connections of the parent process."""
    if isinstance(watch := _watches[0], Member) and os.fork() == 0:
        wait_until(lambda: state_of(watch._head["pid"]) in ("", "Z"), LIMIT_S)
        os._exit(0)
    _die(runtime, 1, compute)


def rank_1_is_stopped(runtime: Runtime) -> None:
    with in_train(runtime):
        _stop(runtime, 1)
        runtime.barrier()


def rank_0_is_stopped(runtime: Runtime) -> None:
    _stop(runtime, 0)
    runtime.barrier()


def rank_1_is_stopped_in_a_collective(runtime: Runtime) -> None:
    """Which times out long before anything else."""
    with in_train(runtime):
        _stop(runtime, 1)
        time_out_soon(runtime)
        runtime.barrier()


def rank_0_is_stopped_in_a_collective(runtime: Runtime) -> None:
    _stop(runtime, 0)
    time_out_soon(runtime)
    runtime.barrier()


def _stop(runtime: Runtime, rank: int) -> None:
    if runtime.rank == rank:
        tell_progress(runtime)
        note_fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_fault("T")


def rank_1_loops(runtime: Runtime) -> None:
    with in_train(runtime):
        _loop(runtime, 1)


def rank_0_loops(runtime: Runtime) -> None:
    _loop(runtime, 0)


def _loop(runtime: Runtime, rank: int) -> None:
    if runtime.rank == rank:
        tell_progress(runtime)
        note_fault()
        compute()
    wait_for_fault()
    time_out_soon(runtime)
    runtime.barrier()


def all_well(runtime: Runtime) -> None:
    """Rank 1 is silent for longer than any patience here; rank 0 waits in a collective meanwhile."""
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
    """Start jobs, one per line of stdin, and write their exit codes and the time."""
    for line in sys.stdin:
        job = json.loads(line)
        port, pids = free_port(), []
        for rank in job["ranks"]:
            if (pid := os.fork()) == 0:
                return _be_rank(rank, port, job)
            pids.append(pid)
        codes, deadline = {}, time.monotonic() + LIMIT_S
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
    open_watch = failure_detection._open
    failure_detection._open = lambda *limits: _watches.append(open_watch(*limits)) or _watches[-1]
    runtime = start(timeout_s=job["timeout_s"])
    with watching(runtime, peer_timeout_s=job["peer_timeout_s"], patience_s=job["patience_s"]):
        globals()[job["body"]](runtime)


if __name__ == "__main__":
    _start_jobs()
