"""This process's part in a job: joined, watched, its config judged, and the run's journal open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_dppo.checks import require_valid
from megatron_dppo.config.schema import Config
from megatron_dppo.journal import Journal
from megatron_dppo.preemption import StopRequests
from megatron_dppo.runtime import Runtime, start, stop
from megatron_dppo.watch import watching


@dataclass(frozen=True)
class Job:
    """What a run needs before it loads anything."""

    runtime: Runtime
    journal: Journal
    requests: StopRequests


@contextmanager
def joined(config: Config) -> Iterator[Job]:
    """Join the other processes, for the time of the body; signals that ask to stop are kept for it.

    Raises:
        ConfigError: The configuration cannot work, or another process uses the run folder.
        LaunchError: The other processes did not come.
    """
    runtime = start(config.run.num_threads, config.run.timeout_s)
    try:
        with StopRequests.handled() as requests, watching(runtime):
            require_valid(config, runtime.world_size)
            with Journal.open(config, runtime) as journal:
                yield Job(runtime, journal, requests)
    finally:
        stop()
