"""Runs of a grid as processes: several at once, resumed after a stop, none lost by another's end.

They are forked from one process that has imported everything: a fifth of a short run would go into that.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_ends
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.reader import read_run

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["megatron_dppo.cli.forked"])
_LOOK_S = 10.0  # between two looks at the runs' metrics


@dataclass(frozen=True)
class GridRun:
    """One run: its folder and its config."""

    folder: Path
    configs: tuple[Path, ...]
    overrides: tuple[str, ...]
    num_rollouts: int
    num_processes: int = 1

    @property
    def num_done(self) -> int:
        """Number of rollouts in its metrics, at most those that are planned."""
        try:
            return min(len(read_run(self.folder).rollouts), self.num_rollouts)
        except DataError:
            return 0

    @property
    def is_finished(self) -> bool:
        """Whether all its rollouts are in its metrics."""
        return self.num_done >= self.num_rollouts

    @property
    def log(self) -> Path:
        """What its processes print; in a separate folder, so that `seed_*` names the runs alone."""
        return self.folder.parent / "logs" / f"{self.folder.name}.log"

    def arguments(self) -> list[str]:
        """What follows `megatron-dppo` on its command line."""
        sets = [*self.overrides, f"run.folder={str(self.folder)!r}", f"run.num_rollouts={self.num_rollouts}"]
        flags = [part for override in sets for part in ("--set", override)]
        return ["train", *map(str, self.configs), *flags]


def last_line(log: Path) -> str:
    """Return the last line of a process's log."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "no output"


def train_all(runs: Sequence[GridRun], num_jobs: int, gpus: Sequence[str] = ()) -> list[GridRun]:
    """Train unfinished runs, `num_jobs` at a time. Interrupted runs resume from their checkpoint.

    An exception, such as KeyboardInterrupt, asks the running ones to save and exit, and waits for them.

    Args:
        runs: The runs; finished ones count as done.
        num_jobs: Number of runs at once.
        gpus: Names of the GPUs, which the jobs divide; none on a machine without.

    Returns:
        Runs with a failed process. The end of the log shows the reason.
    """
    opened = [run for run in runs if not run.is_finished]
    share = len(gpus) // num_jobs
    devices: SimpleQueue[str | None] = SimpleQueue()
    for job in range(num_jobs):
        devices.put(",".join(gpus[job * share : (job + 1) * share]) if share else None)
    failed: list[GridRun] = []
    running = _Running(devices)
    done = {run: run.num_done for run in runs}
    slow = 1.0 if sys.stderr.isatty() else 60.0  # a log gets a line a minute
    with (
        tqdm(total=sum(run.num_rollouts for run in runs), unit="rollout", mininterval=slow) as bar,
        ThreadPoolExecutor(num_jobs) as threads,
        running.ended_at_the_end(),
    ):
        bar.initial = sum(done.values())  # the time left is of what this call does
        bar.update(bar.initial)
        bar.set_description(_counts(runs, opened))
        waiting: dict[Future[int], GridRun] = {threads.submit(running.train, run): run for run in opened}
        while waiting:
            finished, _ = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for run in waiting.values():
                bar.update((now := run.num_done) - done[run])
                done[run] = now
            for future in finished:
                run = waiting.pop(future)
                if future.result() != 0:
                    failed.append(run)
                    tqdm.write(
                        f"{run.folder} ended with status {future.result()}; see {run.log}", file=sys.stderr
                    )
            bar.set_description(_counts(runs, list(waiting.values())))
    return failed


def _counts(runs: Sequence[GridRun], waiting: Sequence[GridRun]) -> str:
    return f"{len(runs) - len(waiting)} of {len(runs)} runs"


def _train(run: GridRun, devices: str | None) -> None:
    """Run a process's body with its output in the log, away from the terminal's signals."""
    os.setsid()
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    if run.num_processes > 1:
        from torch.distributed.run import main as torchrun

        processes = f"--nproc-per-node={run.num_processes}"
        torchrun(["--standalone", processes, "-m", "megatron_dppo", *run.arguments()])
        return
    from megatron_dppo.cli import app

    sys.argv = ["megatron-dppo", *run.arguments()]  # as versions.json will have it
    app(sys.argv[1:])


@dataclass
class _Running:
    """Processes that are running, so that a stop ends them."""

    devices: SimpleQueue[str | None]  # of the jobs that are free
    processes: set[ForkServerProcess] = field(default_factory=set[ForkServerProcess])
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def train(self, run: GridRun) -> int:
        """Train and return the exit status: negative after a signal, 1 if the grid has stopped."""
        devices = self.devices.get()
        process = _FORKS.Process(target=_train, args=(run, devices))
        try:
            with self.lock:
                if self.is_stopped:
                    return 1
                process.start()
                self.processes.add(process)
            wait_for_ends([process.sentinel])
        finally:
            self.devices.put(devices)
            with self.lock:
                self.processes.discard(process)
        with self.lock:  # `start` reads the status of every process that has ended, and it can be read once
            process.join()
        assert process.exitcode is not None, "it has ended"
        return process.exitcode

    @contextmanager
    def ended_at_the_end(self) -> Iterator[None]:
        """Ask running processes to save and exit, if the body ends early."""
        try:
            yield
        finally:
            with self.lock:
                self.is_stopped = True
                for process in self.processes:
                    process.terminate()
