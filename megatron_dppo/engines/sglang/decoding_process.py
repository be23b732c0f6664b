"""Decodes responses in a separate process, so that other threads of the trainer keep running.

Parsing the JSON of a long response holds the GIL: the trainer's CPU time for 16k tokens with top-20 and routes
is 113 ms with SGLang 0.5.21 and 27 ms with later versions (tools/benchmarks/README.md), and no other thread of
the trainer runs meanwhile. This module writes the bytes of the response to shared memory, and reads the decoded
arrays from other shared memory.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from megatron_dppo.engines.sglang.decoding_wire import (
    LENGTH_BYTES,
    SharedMemory,
    frame_of,
    header_length,
    read_answer,
    sizes_in,
)
from megatron_dppo.engines.sglang.replies import READERS, Answer, Expected
from megatron_dppo.errors import ReplyError, RolloutError

_MODULE = "megatron_dppo.engines.sglang.decoding_worker"
_SMALL_BYTES = 64 * 1024  # the pipes cost the trainer 1 to 2 ms of CPU, like decoding about 50 kB
_TIMEOUT_S = 120.0  # of one response, pipes included; 16k tokens with top-20 and routes take under a second
_START_TIMEOUT_S = 300.0  # imports may be slow on a slow disk
_END_TIMEOUT_S = 1.0
_MOST_LOST = 2  # lost children in a row that stop the run; the first one is replaced


class DecodingProcess:
    """Decodes responses in a child process; safe for several threads and event loops at once.

    The child starts with the first large response. It ends with this process, even if this process is killed.
    Responses are decoded one after another, in the order of arrival.
    """

    def __init__(self, *, small_bytes: int = _SMALL_BYTES, timeout_s: float = _TIMEOUT_S) -> None:
        """Start nothing yet.

        Args:
            small_bytes: Responses smaller than this are decoded by the caller, which is faster than the pipes.
            timeout_s: Time limit for one response; a child that takes longer is killed.
        """
        self._small_bytes, self._timeout_s = small_bytes, timeout_s
        self._driver = ThreadPoolExecutor(1, "decoding")  # one thread, started when needed, owns the child
        self._child: _Child | None = None
        self._num_lost = 0  # children lost since the last result

    async def read(self, reader: str, content: bytes, expected: Expected) -> Answer:
        """Parse a response with `READERS[reader]`.

        Raises:
            ReplyError: The response is refused, or the child ended or hung while it decoded the response.
            RoutingReplayError: The routes of the response are refused.
            RolloutError: The child cannot be started, or was lost twice in a row.
        """
        if len(content) < self._small_bytes:
            return READERS[reader](content, expected)
        return await asyncio.wrap_future(self._driver.submit(self._read_there, reader, content, expected))

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while no child runs."""
        child = self._child
        return None if child is None else child.pid

    def _read_there(self, reader: str, content: bytes, expected: Expected) -> Answer:
        if self._child is None or self._child.has_ended:  # ended while idle: no response caused it
            self._child = _Child()
        try:
            header, buffers = self._child.ask(reader, content, expected, self._timeout_s)
        except _LostError as error:
            self._child.kill()
            self._child = None
            self._num_lost += 1
            found = f"{expected.where}: found that the process decoding its {len(content)} bytes {error}"
            if self._num_lost >= _MOST_LOST:
                raise RolloutError(
                    f"{found}, like the process before it; expected arrays. Check what both printed, and "
                    "the machine's memory: the kernel kills processes when memory runs out."
                ) from None
            raise ReplyError(f"{found}; expected arrays. The next response starts another process.") from None
        self._num_lost = 0
        return read_answer(header, buffers)


class _LostError(Exception):
    """The child is lost; the message is a verb phrase that tells how it ended."""


class _Child:
    """The child process with its memory and pipes, which have time-outs. Only one thread uses it."""

    def __init__(self) -> None:
        """Start the process, and wait until it has imported its modules.

        Raises:
            RolloutError: The process did not start.
        """
        self._content, self._arrays = memory = SharedMemory.create(), SharedMemory.create()
        weakref.finalize(self, _close, memory).atexit = False
        descriptors = [each.descriptor for each in memory]
        command = [sys.executable, "-m", _MODULE, *map(str, (os.getpid(), *descriptors))]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's thread pool is not needed
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                bufsize=0,
                pass_fds=descriptors,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise _not_started(f"raised {error}", command) from None
        weakref.finalize(self, _kill, self._process).atexit = False  # at exit, its stdin closes, which ends it
        self._in, self._out = _prepared(self._process.stdin), _prepared(self._process.stdout)
        try:
            with self._answering(_START_TIMEOUT_S) as deadline:
                self._receive(deadline)
        except _LostError as error:
            self.kill()
            raise _not_started(str(error), command) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(
        self, reader: str, content: bytes, expected: Expected, timeout_s: float
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Send a response to decode, and return the header and buffers of the result.

        Raises:
            _LostError: No result came in time, or the process ended.
        """
        header = {"reader": reader, "expected": dataclasses.asdict(expected)}
        with self._answering(timeout_s) as deadline:
            frame = frame_of(header, [content])
            self._content.write(frame.buffers)
            self._send(memoryview(frame.header), deadline)
            return self._receive(deadline)

    def kill(self) -> None:
        """End the process; may be called twice."""
        _kill(self._process)

    @contextlib.contextmanager
    def _answering(self, timeout_s: float) -> Iterator[float]:
        """Yield the deadline of one exchange; a time-out or a closed pipe becomes a `_LostError`."""
        try:
            yield time.monotonic() + timeout_s
        except TimeoutError:
            raise _LostError(f"returned no result within {timeout_s:g} s") from None
        except (BrokenPipeError, EOFError):
            raise _LostError(self._how_it_ended()) from None

    def _send(self, data: memoryview, deadline: float) -> None:
        while data:
            _wait(self._in, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self._in, data) :]

    def _receive(self, deadline: float) -> tuple[dict[str, Any], list[bytearray]]:
        length = header_length(self._bytes(LENGTH_BYTES, deadline))
        header = json.loads(self._bytes(length, deadline))
        return header, self._arrays.read(sizes_in(header))

    def _bytes(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            _wait(self._out, select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                num_read = os.readv(self._out, [left])
                if num_read == 0:
                    raise EOFError
                left = left[num_read:]
        return data

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"


def _not_started(found: str, command: list[str]) -> RolloutError:
    return RolloutError(
        f"the process that decodes responses: found that it {found} at its start; expected it to wait for "
        f"responses. Free memory or processes on this machine, or try: {' '.join(command)} </dev/null"
    )


def _prepared(pipe: IO[bytes] | None) -> int:
    """Make a pipe non-blocking, and return its file descriptor."""
    assert pipe is not None, "Popen was called with pipes"
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _close(memory: Iterable[SharedMemory]) -> None:
    for each in memory:
        each.close()


def _wait(pipe: int, event: int, deadline: float) -> None:
    poll, left_s = select.poll(), deadline - time.monotonic()
    poll.register(pipe, event)
    if left_s <= 0 or not poll.poll(left_s * 1000):
        raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a kernel call ends after the call
        process.wait(_END_TIMEOUT_S)
