"""Failure detection on every other rank: reports to rank 0, and ends when rank 0 requests it."""

import os
import select
import socket
import threading
import time
from typing import Any, NoReturn, TypeGuard

from megatron_dppo.errors import LaunchError
from megatron_dppo.failure_detection.ending import kill, leave_at_once, leave_with, state_of
from megatron_dppo.failure_detection.link import Link, Message, this_machine
from megatron_dppo.failure_detection.report import Report, main_thread_stack
from megatron_dppo.runtime.process import Runtime

_PROGRESS_EVERY_S = 0.5
_LEAVE_TIMEOUT_S = 5.0


class Member:
    """This rank's connection to rank 0, and the thread that serves it."""

    def __init__(self, runtime: Runtime, link: Link, token: str, patience_s: float) -> None:
        """Introduce this rank, and start the thread that serves the connection.

        Raises:
            LaunchError: Rank 0 does not reply.
        """
        self._runtime, self._link, self._patience_s = runtime, link, patience_s
        self._head: Message = {}
        self._report: Report | None = None
        self._is_leaving = self._has_head_left = False
        self._sent_since = 0.0
        me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": this_machine()}
        link.send(kind="hello", token=token, rank=runtime.rank, **me)
        welcome = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(welcome,), name="watch", daemon=True)
        self._thread.start()
        if not welcome.wait(60.0):
            raise LaunchError(f"rank {runtime.rank}: rank 0 did not answer within 60 s. See what it waits for.")

    def fail(self, report: Report) -> NoReturn:
        """Report a failure, and end when rank 0 requests it, or with this report if it does not in time."""
        self._report = report
        if not self._has_head_left:
            self._link.send(kind="report", report=vars(report))
            self._thread.join(self._patience_s)  # rank 0's request, or losing rank 0, ends the process
        place = f"rank {report.rank} (host {socket.gethostname()}, pid {os.getpid()}) failed in {report.where}"
        if self._has_head_left:
            leave_with(f"{place}; rank 0 had already left:\n{report.text}", report.exit_code)
        remark = f"{', in '.join(self._describe_head())}, did not end the job within {self._patience_s:.0f} s"
        pid, is_near = self._head.get("pid", 0), self._head.get("machine") == this_machine() != ""
        if is_near and state_of(pid) == "T":
            kill(pid)
            remark += "; it was stopped, and is killed now"
        leave_with(f"{remark}\n{place}:\n{report.text}", report.exit_code)

    def leave(self, how: str) -> None:
        """Notify rank 0 of a regular exit, so that closing the connection does not count as a death."""
        self._is_leaving = True
        if self._link.send(kind="goodbye", how=how):
            self._thread.join(_LEAVE_TIMEOUT_S)  # rank 0 closes first, so that nothing is lost on the way

    def _serve(self, welcome: threading.Event) -> None:
        while True:
            readable, _, _ = select.select([self._link.socket], [], [], _PROGRESS_EVERY_S)
            messages = self._link.receive() if readable else []
            if messages is None:
                break
            for message in messages:
                self._answer(message, welcome)
            self._tell_progress()
        self._link.close()
        if not self._is_leaving and not self._has_head_left:
            self._mourn_head()

    def _answer(self, message: Message, welcome: threading.Event) -> None:
        kind = message["kind"]
        if kind == "welcome":
            self._head = message | {"where": "start-up", "at": time.monotonic()}
            welcome.set()
        elif kind == "progress":
            self._head |= {"where": message["where"], "at": time.monotonic() - message["for_s"]}
        elif kind == "stack":
            self._link.send(kind="stack", stack=main_thread_stack(), **self._progress())
        elif kind == "goodbye":
            self._has_head_left = True
        elif kind == "end":
            leave_at_once(message["exit_code"])

    def _tell_progress(self) -> None:
        since = self._runtime.progress.since
        if since != self._sent_since:
            self._sent_since = since
            self._link.send(kind="progress", **self._progress())

    def _progress(self) -> dict[str, Any]:
        progress = self._runtime.progress
        return {"where": progress.describe(), "for_s": time.monotonic() - progress.since}

    def _mourn_head(self) -> NoReturn:
        rank, report = self._runtime.rank, self._report
        own = f"rank {rank} failed in {report.where}:\n{report.text}\n" if _is_own(report) else ""
        where = self._runtime.progress.describe()
        who, place = self._describe_head()
        leave_with(f"{own}{who} died while in {place}; rank {rank} ends with it, in {where}", 1)

    def _describe_head(self) -> tuple[str, str]:
        """Return rank 0's name, and its last known progress."""
        head = self._head
        if not head:
            return "rank 0", "start-up"
        ago = time.monotonic() - head["at"]
        return f"rank 0 (host {head['host']}, pid {head['pid']})", f"{head['where']} for {ago:.1f} s"


def _is_own(report: Report | None) -> TypeGuard[Report]:
    """Whether this rank itself raised an error."""
    return report is not None and report.kind == "raised"
