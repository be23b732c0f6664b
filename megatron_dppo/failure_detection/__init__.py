"""Ends the whole job when one rank dies, raises or hangs, and logs that rank's error last.

A collective reports that another rank is gone, but not which one, nor why. README.md says how each kind of
failure is noticed, and what each module does.

torchrun and the process groups' time-outs do a part of this without this package. With two ranks under torchrun
and a time-out of 6 s, faults of tests/faults ended the job after these times, with this package and without it:

    kill -9 of a rank     2 s    2 to 3 s
    an exception          3 s   10 s
    a rank that hangs     9 s   40 s, including torchrun's --shutdown-timeout of 30 s (480 s in examples/slurm)
    a stopped rank 0     18 s   39 s

Without this package, torchrun reports the waiting rank as the root cause of a hang, and shows no stack of the
hung rank. A second torchrun, as on another node, still kept its hung rank 26 s after the first torchrun had
ended.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

from megatron_dppo.errors import LaunchError
from megatron_dppo.failure_detection.link import Link
from megatron_dppo.failure_detection.report import Report, record_for_torchrun
from megatron_dppo.failure_detection.watch import Head, Member
from megatron_dppo.runtime.process import Runtime

_CONNECT_TIMEOUT_S = 60.0


@contextlib.contextmanager
def watching(
    runtime: Runtime, *, peer_timeout_s: float = 60.0, grace_s: float = 1.0, patience_s: float = 10.0
) -> Iterator[None]:
    """End the job on every rank as soon as the body fails on one; a job of one rank just raises.

    Enter it on all ranks, inside the handler of SIGTERM: torchrun sends SIGTERM to rank 0 when another rank
    dies, and rank 0 must live to report. With several ranks, no exception leaves the body: the process ends
    with `errors.exit_status`. SystemExit passes, because it is not a failure.

    Args:
        runtime: Runtime of this rank. Messages use its `progress` as the place of an error.
        peer_timeout_s: Seconds for which a rank or its host may be silent.
        grace_s: Seconds that rank 0 waits for other reports, which may be the cause of the first one.
        patience_s: Seconds that a failed rank waits for rank 0 to end it, before it ends itself.
    """
    if runtime.world_size == 1:
        yield
        return
    watch = _open(runtime, grace_s, patience_s, peer_timeout_s)
    try:
        yield
    except SystemExit as end:
        watch.leave(f"exit status {end.code or 0}")
        raise
    except BaseException as error:  # noqa: BLE001 - reported by rank 0
        _ignore_sigterm()
        report = Report.of(error, runtime)
        if report.kind == "raised":
            record_for_torchrun(error)
        watch.fail(report)
    else:
        watch.leave("a normal exit")


def _open(runtime: Runtime, grace_s: float, patience_s: float, peer_timeout_s: float) -> Head | Member:
    head = Head(runtime, grace_s, patience_s, peer_timeout_s) if runtime.is_main else None
    try:
        host, port, token = runtime.on_main(head.open if head else _only_on_main)
    except RuntimeError as error:
        found = str(error).partition("\n")[0]
        raise LaunchError(
            f"rank {runtime.rank}: expected all ranks to start failure detection; found that one of them ended "
            f"('{found}'). See the logs of the other ranks."
        ) from error
    if head is not None:
        try:
            head.wait_for_members(_CONNECT_TIMEOUT_S)
        except LaunchError as error:  # ranks that are connected end with it
            head.fail(Report.of(error, runtime))
        return head
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    except OSError as error:
        raise LaunchError(
            f"rank {runtime.rank}: expected to reach rank 0 at {host}:{port}; found '{error}'. The ranks' "
            "hosts must reach each other on all ports, as gloo and NCCL need too."
        ) from error
    return Member(runtime, Link(connection, peer_timeout_s), token, patience_s, peer_timeout_s)


def _only_on_main() -> tuple[str, int, str]:
    raise AssertionError("run by rank 0 only, which gives its own")


def _ignore_sigterm() -> None:
    """Ignore SIGTERM, which a launcher sends when another rank has ended, until the error is reported."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
