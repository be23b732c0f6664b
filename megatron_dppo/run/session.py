"""Starts a session: joins the job's processes, detects failures, checks the config and opens the run logger."""

import logging
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.checkpoints import checkpoint_folder
from megatron_dppo.checks import BEFORE_LOADING, require_valid
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.options import nccl_settings
from megatron_dppo.errors import InUseError, StorageError
from megatron_dppo.failure_detection import watching
from megatron_dppo.run.logger import RunLogger
from megatron_dppo.run.preemption import EXIT_CODE, StopRequests
from megatron_dppo.runtime.files import full_disk_explained
from megatron_dppo.runtime.process import Runtime, start, stop

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSession:
    """Runtime, run logger and stop signals of a training run, ready before it loads a model."""

    runtime: Runtime
    logger: RunLogger
    stop_requests: StopRequests


@contextmanager
def start_session(config: Config, *, accepts_changes: bool = False) -> Generator[RunSession]:
    """Start a training run's session for the time of the body, and handle its stop signals.

    If `accepts_changes` is true, a run may be resumed with settings that make another experiment.
    """
    run, requests = config.run.folder, StopRequests(has_begun=False)
    with (
        join_processes(config, requests.handle_signals()) as runtime,
        full_disk_explained(run, kept=lambda: newest_checkpoint(run)),
    ):
        size, needs = runtime.world_size, BEFORE_LOADING
        runtime.on_main(lambda: require_valid(config, size, accepts_changes=accepts_changes, needs=needs))
        with ExitStack() as stack:
            try:
                logger = stack.enter_context(RunLogger.open(config, runtime))
            except InUseError as error:
                if runtime.is_main:
                    log.error("%s", error)
                raise SystemExit(EXIT_CODE) from error
            yield RunSession(runtime, logger, requests)


@contextmanager
def join_processes(
    config: Config, signal_handling: AbstractContextManager[object] | None = None
) -> Generator[Runtime]:
    """Join the other processes of the job for the time of the body; a failure on one rank ends all of them.

    Args:
        config: Config with the number of threads, and the time-outs for the other ranks.
        signal_handling: Context manager that handles SIGTERM; failure detection must run inside of it.
    """
    os.environ.update(nccl_settings(config))  # before NCCL starts, which reads them once
    runtime = start(config.run.num_threads, config.run.timeout_s)
    try:
        with signal_handling or nullcontext(), watching(runtime, peer_timeout_s=config.run.peer_timeout_s):
            yield runtime
    finally:
        stop()


def newest_checkpoint(run: Path) -> str:
    """Return a sentence on the run's newest checkpoint, for the message of an error."""
    try:
        newest = next(iter(checkpoint_folder.candidates(run / "checkpoints")), None)
    except StorageError:
        return ""
    return "There is no checkpoint yet. " if newest is None else f"The newest checkpoint is {newest}. "
