"""Starts and drives one worker process, with non-blocking pipes and deadlines, and reports how it ended."""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import IO, Generic

from megatron_dppo.errors import Problem
from megatron_dppo.runtime.framing import FrameReader
from megatron_dppo.runtime.user_code import advice_on_variables, user_environment
from megatron_dppo.workers.service import (
    LOADED,
    A,
    FileDigests,
    Q,
    Service,
    WorkerFault,
    WorkerFaultKind,
    encode,
    read_reply,
)

_START_TIMEOUT_S = 300.0  # a user's module may import many others, from a slow disk
_END_TIMEOUT_S = 10.0  # between closing its pipes and the end of the process, on a busy machine
_CHECK_EVERY_S = 0.1  # interval of checks whether the caller still waits
_MAX_REPLY = 1 << 20  # bytes
_MAX_PRINTED = 4096  # bytes of stderr that are kept

IsCancelled = Callable[[], bool]
"""Returns whether the caller has stopped waiting."""


class WorkerLostError(Exception):
    """The worker sent no valid reply and is lost. `printed` is the last output of a dead worker."""

    def __init__(self, kind: WorkerFaultKind, message: str, printed: str = "") -> None:
        super().__init__(message)
        self.kind: WorkerFaultKind = kind
        self.printed = printed


class CallCancelledError(Exception):
    """The caller no longer waits for a reply."""


class WorkerProcess(Generic[Q, A]):
    """One process of a service in its own process group; one thread at a time drives it."""

    def __init__(
        self,
        service: Service[Q, A],
        name: str,
        memory_mb: int,
        is_cancelled: IsCancelled,
        environment: Collection[str],
        files: FileDigests,
        descriptors: Collection[int] = (),
    ) -> None:
        """Start the process, and wait until it has loaded `name`; add the files that it reads to `files`.

        It inherits the open files `descriptors`.
        """
        self._service, self._environment, self._files = service, environment, files
        if absent := [variable for variable in environment if variable not in os.environ]:
            found, action = f"{', '.join(absent)}, not set here", "Export it on every node, or remove the name."
            expected = "environment variables of the trainer"
            raise service.error(str(Problem("data.worker_environment", found, expected, action)))
        command = [sys.executable, "-m", service.module, name, str(memory_mb)]
        pipe, variables = subprocess.PIPE, {**user_environment(environment), **service.variables}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,
                env=variables,
                pass_fds=tuple(descriptors),
            )
        except OSError as error:
            raise service.shortage(error) from error
        self._in, self._out, self._err = (
            _unblock(pipe) for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._poll.register(self._err, select.POLLIN)
        self._unsent, self._printed = memoryview(b""), b""
        self._reader, self._received = FrameReader(_MAX_REPLY), deque[bytes]()
        try:
            problem = self._hello(name, is_cancelled)
        except BaseException:
            self.kill()
            raise
        if problem is not None:
            self.kill()
            raise service.error(f"{problem}{self._last_printed(problem)}")

    @property
    def is_writable(self) -> bool:
        """Whether all sent bytes are in the pipe."""
        return not self._unsent

    def send(self, number: int, request: Q) -> None:
        """Send a request; bytes that do not fit into the pipe now are sent while `receive` waits."""
        assert self.is_writable, "one request at a time is written to the pipe"
        self._unsent = memoryview(encode({"number": number, "request": request}))
        self._poll.register(self._in, select.POLLOUT)
        self._write()

    def receive(self, number: int, timeout_s: float, is_cancelled: IsCancelled) -> A | WorkerFault:
        """Return the reply to request `number`, the oldest request without a reply."""
        message = self._message(timeout_s, is_cancelled)
        try:
            answer = read_reply(message, number, self._service.answer, self._files)
        except ValueError as error:
            raise WorkerLostError("failed", f"its worker sent {error}") from error
        if isinstance(answer, WorkerFault):
            advice = advice_on_variables(answer.message, self._environment)
            return replace(answer, message=answer.message + advice)
        return answer

    def ask_to_end(self) -> None:
        """Close an idle worker's stdin, so that it ends by itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self, grace_s: float = 0.0) -> None:
        """End the process and all its children, after `grace_s` at most; may be called twice."""
        if self._process.returncode is not None:
            return
        self._status(grace_s)
        # The process is not reaped yet, so the id still belongs to its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and dies afterwards
            self._process.wait(_END_TIMEOUT_S)
        self._read_printed()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _hello(self, name: str, is_cancelled: IsCancelled) -> str | None:
        try:
            hello = self._message(_START_TIMEOUT_S, is_cancelled)
            loaded = read_reply(hello, LOADED, type(None), self._files)
            return loaded.message if loaded is not None else None
        except (WorkerLostError, ValueError) as error:
            self.kill()
            command = f"python -m {self._service.module} {shlex.quote(name)} 0 </dev/null"
            raise self._service.error(
                f"{self._service.key}: found that {name!r} did not start: {error}; expected its worker "
                f"to load the {self._service.noun}. Try: {command}{self._last_printed()}"
            ) from error

    def _message(self, timeout_s: float, is_cancelled: IsCancelled) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not self._received:
            self._exchange(deadline, timeout_s, is_cancelled)
        return self._received.popleft()

    def _exchange(self, deadline: float, timeout_s: float, is_cancelled: IsCancelled) -> None:
        """Wait for any pipe, then read and write without blocking, because each pipe may be full."""
        if is_cancelled():
            raise CallCancelledError
        wait_s = min(max(deadline - time.monotonic(), 0.0), _CHECK_EVERY_S)
        ready = {pipe for pipe, _ in self._poll.poll(wait_s * 1000)}
        if self._err in ready:
            self._read_printed()
        if self._in in ready:
            self._write()
        if self._out in ready:
            self._read()
        elif time.monotonic() >= deadline:
            raise WorkerLostError("timed_out", f"found no reply within {timeout_s:g} s")

    def _read(self) -> None:
        data = os.read(self._out, 1 << 16)
        if not data:
            raise WorkerLostError("failed", f"its worker {self._how_it_ended()}", self._last_printed())
        try:
            self._received += self._reader.feed(data)
        except ValueError as error:
            raise WorkerLostError("failed", f"its worker sent {error}") from error

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = memoryview(b"")  # `_read` reports how it ended
        if not self._unsent:
            self._poll.unregister(self._in)

    def _read_printed(self) -> None:
        """Read the worker's stderr, and keep the end of it."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._err, 1 << 16)
            self._printed = (self._printed + data)[-_MAX_PRINTED:]
            if not data:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._err)

    def _last_printed(self, problem: str = "") -> str:
        text = self._printed.decode(errors="replace").strip()
        advice = advice_on_variables(f"{problem}\n{text}", self._environment)
        return (f"\nIts last output:\n{text}" if text else "") + advice

    def _how_it_ended(self) -> str:
        status = self._status(_END_TIMEOUT_S)
        self._read_printed()
        if status is None:
            return "closed its pipes"
        if status.si_code == os.CLD_EXITED:
            return f"exited with code {status.si_status}"
        return f"was killed by {signal.Signals(status.si_status).name}"

    def _status(self, timeout_s: float) -> os.waitid_result | None:
        """Return how the process ended, without reaping it: its process id must stay taken until `kill`."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None or time.monotonic() >= deadline:
                return status
            time.sleep(0.001)


def _unblock(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()
