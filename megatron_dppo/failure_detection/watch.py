"""Failure detection on rank 0: collects all ranks' reports, finds the first cause, ends the job and logs it."""

import os
import queue
import secrets
import select
import selectors
import socket
import threading
import time
from typing import Any, NoReturn, TypeGuard

from megatron_dppo.errors import LaunchError
from megatron_dppo.failure_detection.link import (
    Door,
    Link,
    Loss,
    Message,
    beat_s,
    close_in_children,
    kill,
    leave_at_once,
    leave_with,
    listen,
    state_of,
    this_machine,
    watch_thread,
)
from megatron_dppo.failure_detection.report import (
    LOST,
    Rank,
    Report,
    first_cause,
    job_failure,
    main_thread_stack,
    record_for_torchrun,
)
from megatron_dppo.runtime.process import Runtime

_POLL_S = 0.25
_PROGRESS_EVERY_S = 0.5
_ANSWER_TIMEOUT_S = 5.0  # of a hung rank, which a busy machine may keep from answering
_END_TIMEOUT_S = 5.0  # of a rank that was asked to end, and runs; then it is killed
_FAREWELL_S = 10.0
_LEAVE_TIMEOUT_S = 5.0


class Head:
    """Serves the connections to all other ranks from a listening socket, in one thread."""

    def __init__(self, runtime: Runtime, grace_s: float, patience_s: float, peer_timeout_s: float) -> None:
        """Create the sockets and the thread; call `open` next."""
        self._runtime, self._grace_s, self._patience_s = runtime, grace_s, patience_s
        self._peer_timeout_s = peer_timeout_s
        self._ranks = {0: Rank(0, socket.gethostname(), os.getpid())}
        self._links: dict[int, Link] = {}
        self._machines = {0: this_machine()}
        self._reports: list[Report] = []
        self._first_report_at = self._asked_at = self._left_at = self._told_at = 0.0
        self._told_since = self._beat_at = 0.0
        self._inbox: queue.SimpleQueue[Report | str] = queue.SimpleQueue()  # from the main thread
        self._all_here = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._token = secrets.token_hex(16)
        self._thread = watch_thread(self._serve)

    def open(self) -> tuple[str, int, str]:
        """Start listening; return the host, port and token that the other ranks need."""
        listener, host = listen(os.environ["MASTER_ADDR"])
        port: int = listener.getsockname()[1]
        for ours in (listener, self._wake, self._woken):
            close_in_children(ours)
        token, size = self._token.encode(), self._runtime.world_size
        self._door = Door(self._selector, listener, token, size, self._admit)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(64))
        self._thread.start()
        return host, port, self._token

    def wait_for_members(self, timeout_s: float) -> None:
        """Wait until every rank is connected."""
        if not self._all_here.wait(timeout_s):
            absent = sorted(set(range(self._runtime.world_size)) - set(self._ranks))
            raise LaunchError(
                f"expected every rank to connect to rank 0 within {timeout_s:.0f} s; missing: {absent}. "
                "Their hosts must reach this one on all ports, as gloo and NCCL need too."
            )

    def fail(self, report: Report) -> NoReturn:
        """Report a failure, and end with the job's first cause, or with this report if none is found."""
        self._tell(report)
        self._thread.join(self._patience_s)  # the thread ends the process if it finds the cause
        place = f"rank 0 failed in {report.where}, and no first cause was found within {self._patience_s:.0f} s"
        leave_with(f"{place}:\n{report.text}", report.exit_code)

    def leave(self, how: str) -> None:
        """Wait some seconds for the other ranks to leave, and still report their failures."""
        self._tell(how)
        self._thread.join(_FAREWELL_S + self._patience_s)

    def _tell(self, word: Report | str) -> None:
        self._inbox.put(word)
        self._wake.send(b"x")

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(_POLL_S if not self._reports else _POLL_S / 5):
                key.data()
            while not self._inbox.empty():
                self._hear_main_thread(self._inbox.get())
            self._door.close_late()
            self._tell_progress()
            self._find_silent_ranks()
            if self._reports:
                if self._is_decidable():
                    self._end_job()
            elif self._left_at and (not self._links or time.monotonic() - self._left_at > _FAREWELL_S):
                break
        for link in self._links.values():
            link.send(kind="goodbye")
            link.close()
        self._door.close()

    def _admit(self, connection: socket.socket) -> None:
        """Wait for the first message of a connection that has sent the token."""
        link = Link(connection, self._peer_timeout_s)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._meet(link))

    def _meet(self, link: Link) -> None:
        """Register the rank that a connection's first message names."""
        messages = link.receive()
        if messages == []:
            return
        self._selector.unregister(link.socket)
        hello = messages[0] if messages else {}
        number = hello.get("rank", 0)
        if number in self._ranks:  # no rank, or one that is there
            link.close()
            return
        self._ranks[number] = Rank(number, hello["host"], hello["pid"])
        self._links[number], self._machines[number] = link, hello["machine"]
        self._selector.register(link.socket, selectors.EVENT_READ, lambda: self._hear(number, link))
        me = self._ranks[0]
        link.send(kind="welcome", host=me.host, pid=me.pid, machine=self._machines[0])
        for message in (messages or [])[1:]:
            self._on_message(self._ranks[number], message)
        if len(self._ranks) == self._runtime.world_size:
            self._door.close()
            self._all_here.set()

    def _hear(self, number: int, link: Link) -> None:
        messages, rank = link.receive(), self._ranks[number]
        for message in messages or ():
            self._on_message(rank, message)
        if messages is None and not rank.end:
            self._lose(rank, link.loss or Loss.of(None))
        if messages is None or rank.end == "left":
            self._selector.unregister(link.socket)
            link.close()
            del self._links[number]

    def _lose(self, rank: Rank, loss: Loss) -> None:
        rank.end = loss.kind
        for_s = time.monotonic() - rank.since
        self._add(Report(rank.number, loss.kind, 1, loss.kind, loss.found, rank.where, for_s))

    def _find_silent_ranks(self) -> None:
        for number, link in self._links.items():
            if link.is_silent() and not self._ranks[number].end:
                self._lose(self._ranks[number], link.loss or Loss.of(None))

    def _on_message(self, rank: Rank, message: Message) -> None:
        kind = message["kind"]
        if kind == "beat":
            return
        if kind == "report":
            rank.end = "failed"
            self._add(Report(**message["report"]))
        elif kind == "goodbye":
            rank.end, rank.how = "left", message["how"]
        else:  # "progress", or the requested "stack"
            rank.where, rank.since = message["where"], time.monotonic() - message["for_s"]
            rank.stack = message.get("stack", rank.stack)

    def _hear_main_thread(self, word: Report | str) -> None:
        me = self._ranks[0]
        if isinstance(word, Report):
            me.end = "failed"
            self._add(word)
        else:
            me.end, me.how, self._left_at = "left", word, time.monotonic()

    def _add(self, report: Report) -> None:
        self._first_report_at = self._first_report_at or time.monotonic()
        self._reports.append(report)

    def _tell_progress(self) -> None:
        """Send this rank's progress to the others, for their messages if it dies, or that it lives."""
        progress, now, me = self._runtime.progress, time.monotonic(), self._ranks[0]
        if progress.since == self._told_since or now - self._told_at < _PROGRESS_EVERY_S:
            if now - max(self._beat_at, self._told_at) >= beat_s(self._peer_timeout_s):
                self._beat_at = now
                for link in self._links.values():
                    link.send(kind="beat")
            return
        self._told_at, self._told_since = now, progress.since
        me.where, me.since = progress.describe(), progress.since
        for link in self._links.values():
            link.send(kind="progress", where=me.where, for_s=now - me.since)

    def _is_decidable(self) -> bool:
        """Whether the first cause is known, so that no later report can explain the others.

        After a time-out, request the stacks of the ranks that did not report.
        """
        silent = [rank for rank in self._ranks.values() if not rank.end]
        waited = time.monotonic() - self._first_report_at
        if not silent:
            return True
        if waited < self._grace_s:
            return False
        kind = first_cause(self._reports).kind
        if kind not in ("late", "lost", "repeated"):
            return True
        if not self._asked_at:
            self._asked_at = time.monotonic()
            self._ask(silent)
        has_answers = (
            all(rank.stack for rank in silent) or time.monotonic() - self._asked_at > _ANSWER_TIMEOUT_S
        )
        return has_answers and (kind == "late" or waited > 3 * self._grace_s)

    def _ask(self, silent: list[Rank]) -> None:
        for rank in silent:
            if rank.number == 0:
                progress = self._runtime.progress
                rank.where, rank.since, rank.stack = progress.describe(), progress.since, main_thread_stack()
            elif rank.number in self._links:
                self._links[rank.number].send(kind="stack")

    def _end_job(self) -> NoReturn:
        """End all ranks, wait until they are gone, and write the first cause as the last message."""
        for rank in self._ranks.values():
            is_near = self._machines[rank.number] == self._machines[0] != ""
            if not rank.end and is_near and state_of(rank.pid) == "T":
                rank.silence = "its process is stopped (by SIGSTOP, or a debugger)"
        failure = job_failure(self._reports, self._ranks, time.monotonic())
        if first_cause(self._reports).kind != "raised":  # the rank that raised has already recorded it
            try:
                raise _JobFailed(failure.text)
            except _JobFailed as error:
                record_for_torchrun(error)
        for link in self._links.values():
            link.send(kind="end", exit_code=failure.exit_code)
        self._wait_until_gone()
        for number in self._links:
            if self._machines[number] == self._machines[0] != "":
                kill(self._ranks[number].pid)
        self._wait_until_gone()
        left = "".join(f"{self._ranks[number]} could not be ended from here\n" for number in self._links)
        leave_with(left + failure.text, failure.exit_code)

    def _wait_until_gone(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self._links and time.monotonic() < deadline:
            for key, _ in self._selector.select(_POLL_S / 5):
                key.data()


class Member:
    """This rank's connection to rank 0, and the thread that serves it."""

    def __init__(
        self, runtime: Runtime, link: Link, token: str, patience_s: float, peer_timeout_s: float
    ) -> None:
        """Introduce this rank, and start the thread that serves the connection."""
        self._runtime, self._link, self._patience_s = runtime, link, patience_s
        self._head: Message = {}
        self._report: Report | None = None
        self._is_leaving = self._has_head_left = False
        self._sent_since, self._sent_at = 0.0, time.monotonic()
        self._beat_s = beat_s(peer_timeout_s)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "machine": this_machine()}
        link.introduce(token.encode(), kind="hello", rank=runtime.rank, **me)
        welcome = threading.Event()
        self._thread = watch_thread(lambda: self._serve(welcome))
        self._thread.start()
        if not welcome.wait(60.0):
            raise LaunchError(f"rank {runtime.rank}: rank 0 did not reply within 60 s. See what it waits for.")

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
        remark += self._kill_stopped_head()
        leave_with(f"{remark}\n{place}:\n{report.text}", report.exit_code)

    def leave(self, how: str) -> None:
        """Notify rank 0 of a regular exit, so that closing the connection does not count as a death."""
        self._is_leaving = True
        if self._link.send(kind="goodbye", how=how):
            self._thread.join(_LEAVE_TIMEOUT_S)  # rank 0 closes first, so that nothing is lost on the way

    def _serve(self, welcome: threading.Event) -> None:
        while True:
            wait_s = min(_PROGRESS_EVERY_S, self._beat_s)
            readable, _, _ = select.select([self._link.socket], [], [], wait_s)
            messages = self._link.receive() if readable else []
            if messages is None:
                break
            for message in messages:
                self._answer(message, welcome)
            self._tell_progress()
            if self._head and self._link.is_silent():
                break
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
            self._sent_since, self._sent_at = since, time.monotonic()
            self._link.send(kind="progress", **self._progress())
        elif time.monotonic() - self._sent_at >= self._beat_s:
            self._sent_at = time.monotonic()
            self._link.send(kind="beat")

    def _progress(self) -> dict[str, Any]:
        progress = self._runtime.progress
        return {"where": progress.describe(), "for_s": time.monotonic() - progress.since}

    def _mourn_head(self) -> NoReturn:
        rank, report = self._runtime.rank, self._report
        own = f"rank {rank} failed in {report.where}:\n{report.text}\n" if _is_own(report) else ""
        where = self._runtime.progress.describe()
        who, place = self._describe_head()
        loss = self._link.loss or Loss.of(None)
        end = LOST.get(loss.kind, LOST["died"])
        text = (
            f"{end.verb} while in {place} ({loss.found}){self._kill_stopped_head()}; rank {rank} ends with it"
        )
        leave_with(f"{own}{who} {text}, in {where}. {end.advice}", 1)

    def _kill_stopped_head(self) -> str:
        """Kill rank 0 if it is a stopped process of this machine; return a remark on that."""
        pid, is_near = self._head.get("pid", 0), self._head.get("machine") == this_machine() != ""
        if not is_near or state_of(pid) != "T":
            return ""
        kill(pid)
        return "; it was stopped, and is killed now"

    def _describe_head(self) -> tuple[str, str]:
        """Return rank 0's name, and its last known progress."""
        head = self._head
        if not head:
            return "rank 0", "start-up"
        ago = time.monotonic() - head["at"]
        return f"rank 0 (host {head['host']}, pid {head['pid']})", f"{head['where']} for {ago:.1f} s"


class _JobFailed(Exception):
    """Exception with the cause of the job's failure, recorded for torchrun."""


def _is_own(report: Report | None) -> TypeGuard[Report]:
    """Whether this rank itself raised an error."""
    return report is not None and report.kind == "raised"
