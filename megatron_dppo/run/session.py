"""Starts a session: joins the job, watches its ranks, checks the config, and opens the run logger."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_dppo.checks import BEFORE_LOADING, require_valid
from megatron_dppo.config.schema import Config
from megatron_dppo.failure_detection import watching
from megatron_dppo.run.logger import Journal
from megatron_dppo.run.preemption import StopRequests
from megatron_dppo.runtime.process import Runtime, start, stop


@dataclass(frozen=True)
class Job:
    """What a run needs before it loads anything."""

    runtime: Runtime
    journal: Journal
    requests: StopRequests


@contextmanager
def joined(config: Config, *, accepts_changes: bool = False) -> Iterator[Job]:
    """Join the other processes, for the time of the body; signals that ask to stop are kept for it.

    With `accepts_changes`, a run may be resumed with settings that make another experiment.

    Raises:
        ConfigError: The configuration cannot work, or another process uses the run folder.
        LaunchError: The other processes did not come.
    """
    runtime = start(config.run.num_threads, config.run.timeout_s)
    try:
        with StopRequests.handled() as requests, watching(runtime):
            options = {"accepts_changes": accepts_changes, "needs": BEFORE_LOADING}
            runtime.on_main(lambda: require_valid(config, runtime.world_size, **options))
            with Journal.open(config, runtime) as journal:
                yield Job(runtime, journal, requests)
    finally:
        stop()
