"""Runs jobs in threads and processes; an error in one process is raised in all."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from megatron_dppo.errors import ConversionError
from megatron_dppo.runtime.process import Runtime

T = TypeVar("T")


def run_jobs(runtime: Runtime, jobs: Sequence[T], work: Callable[[T], None], num_threads: int) -> None:
    """Run this process's jobs, and wait for the other processes; all processes call this together.

    Args:
        runtime: This process.
        jobs: Jobs of this process.
        work: Function that runs one job; called in several threads.
        num_threads: Number of jobs that run at a time.

    Raises:
        ConversionError: A job of another process failed. An error of this process's job is raised unchanged.
    """
    own: BaseException | None = None
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        own = next((error for future in done if (error := future.exception()) is not None), None)
        if own is not None:
            pool.shutdown(cancel_futures=True)
    failures = runtime.all_gather(None if own is None else f"{type(own).__name__}: {own}")
    if own is not None:
        raise own
    other = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
    if other is not None:
        raise ConversionError(f"rank {other[0]}: {other[1]}")
