"""Runs of the study as processes: several at once, resumed after a stop, none lost by another's end.

They are forked from one process that has imported everything: a fifth of a short run would go into that.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tqdm import tqdm

from megatron_dppo.cli import app
from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.reader import read_run

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["megatron_dppo.train"])


@dataclass(frozen=True)
class Task:
    """One run: its folder and its config."""

    folder: Path
    configs: tuple[Path, ...]
    overrides: tuple[str, ...]
    num_rollouts: int

    @property
    def is_finished(self) -> bool:
        """Whether all its rollouts are in its metrics."""
        try:
            return len(read_run(self.folder).rollouts) >= self.num_rollouts
        except DataError:
            return False

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.folder.with_suffix(".log")

    def arguments(self) -> list[str]:
        """What follows `megatron-dppo` on its command line."""
        sets = [*self.overrides, f"run.folder={str(self.folder)!r}", f"run.num_rollouts={self.num_rollouts}"]
        flags = [part for override in sets for part in ("--set", override)]
        return ["train", *map(str, self.configs), *flags]


def _train(task: Task) -> None:
    """Run a process's body with its output in the log."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sys.argv = ["megatron-dppo", *task.arguments()]  # as versions.json will have it
    app(sys.argv[1:])


@dataclass
class _Running:
    """Processes that are running, so that a stop ends them."""

    processes: set[ForkServerProcess] = field(default_factory=set[ForkServerProcess])
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def run(self, task: Task) -> int:
        """Run a task and return its exit status: negative after a signal, 1 if the study has stopped."""
        process = _FORKS.Process(target=_train, args=(task,))
        with self.lock:
            if self.is_stopped:
                return 1
            process.start()
            self.processes.add(process)
        try:
            process.join()
        finally:
            with self.lock:
                self.processes.discard(process)
        return process.exitcode or 0

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


def run_all(tasks: Sequence[Task], num_jobs: int) -> list[Task]:
    """Run unfinished tasks, `num_jobs` at a time. Interrupted runs resume from their checkpoint.

    Returns:
        Tasks with a failed process. The end of its log shows the reason.
    """
    open_tasks = [task for task in tasks if not task.is_finished]
    failed: list[Task] = []
    running = _Running()
    with (
        tqdm(total=len(tasks), initial=len(tasks) - len(open_tasks), unit="run", desc="study") as bar,
        ThreadPoolExecutor(num_jobs) as threads,
        running.ended_at_the_end(),
    ):
        futures = {threads.submit(running.run, task): task for task in open_tasks}
        for future in as_completed(futures):
            task = futures[future]
            if future.result() != 0:
                failed.append(task)
                tqdm.write(f"{task.folder} ended with status {future.result()}; see {task.log}")
            bar.update()
    return failed
