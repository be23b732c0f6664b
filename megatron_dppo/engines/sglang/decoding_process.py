"""Decodes answers in a process of its own, so that other threads of the trainer go on meanwhile.

Parsing the JSON of a long answer holds the interpreter's lock for as long as it takes: a tenth of a second for
16k tokens with top-20 and routes, in which no other thread of this process runs. Here the bytes of the answer
are written to memory that both processes see, and arrays are read from other such memory.
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
_SMALL_BYTES = 64 * 1024  # the pipes cost the trainer 1 to 2 ms of CPU, as much as decoding some 50 kB does
_TIMEOUT_S = 120.0  # of one answer, its way through the pipes included; 16k tokens with all take half a second
_START_TIMEOUT_S = 300.0  # importing may be slow from a slow disk
_END_TIMEOUT_S = 1.0
_MOST_LOST = 2  # in a row: the process is replaced once


class DecodingProcess:
    """Reads answers in a child of this process; safe for several threads and event loops at once.

    The child starts with the first large answer, and ends with this process, even if that is killed. Answers
    are decoded one after another, in the order in which they came.
    """

    def __init__(self, *, small_bytes: int = _SMALL_BYTES, timeout_s: float = _TIMEOUT_S) -> None:
        """Start nothing yet.

        Args:
            small_bytes: Answers below it are decoded by the caller, which takes less time than the pipes do.
            timeout_s: Of one answer; a child that takes longer is killed.
        """
        self._small_bytes, self._timeout_s = small_bytes, timeout_s
        self._driver = ThreadPoolExecutor(1, "decoding")  # its one thread, started when needed, owns the child
        self._child: _Child | None = None
        self._num_lost = 0  # children, since one gave an answer

    async def read(self, reader: str, content: bytes, expected: Expected) -> Answer:
        """Return what the function `READERS[reader]` makes of an answer.

        Raises:
            ReplyError: The answer is refused, or the child ended or hung while it decoded it.
            RoutingReplayError: Its routes are refused.
            RolloutError: The child cannot be started, or was lost twice in a row.
        """
        if len(content) < self._small_bytes:
            return READERS[reader](content, expected)
        return await asyncio.wrap_future(self._driver.submit(self._read_there, reader, content, expected))

    @property
    def pid(self) -> int | None:
        """Process id of the child; none while there is none."""
        child = self._child
        return None if child is None else child.pid

    def _read_there(self, reader: str, content: bytes, expected: Expected) -> Answer:
        if self._child is None or self._child.has_ended:  # while it was idle: no answer's fault
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
                    f"{found}, as the one before it was lost; expected arrays. Look for what both printed, and "
                    "at the machine's memory: the kernel ends processes where it is short."
                ) from None
            raise ReplyError(f"{found}; expected arrays. The next answer starts another.") from None
        self._num_lost = 0
        return read_answer(header, buffers)


class _LostError(Exception):
    """The child does not answer; the message says how it ended, as a verb."""


class _Child:
    """The process, its memory, and its pipes, which never block without a limit; one thread drives it."""

    def __init__(self) -> None:
        """Start it, and wait until it has imported what it needs.

        Raises:
            RolloutError: It did not start.
        """
        self._content, self._arrays = memory = SharedMemory.create(), SharedMemory.create()
        weakref.finalize(self, _close, memory).atexit = False
        descriptors = [each.descriptor for each in memory]
        command = [sys.executable, "-m", _MODULE, *map(str, (os.getpid(), *descriptors))]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's pool of threads would not be used
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
        weakref.finalize(self, _kill, self._process).atexit = False  # then it ends by itself: its stdin does
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
        """Send an answer, and return the frame that comes back.

        Raises:
            _LostError: None came in time, or the process ended.
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
        """Yield the deadline of one exchange; what goes wrong with the process becomes a `_LostError`."""
        try:
            yield time.monotonic() + timeout_s
        except TimeoutError:
            raise _LostError(f"gave no answer within {timeout_s:g} s") from None
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
        f"the process that decodes answers: found that it {found} when it was started; expected it to wait for "
        f"answers. Free memory or processes on this machine, or try: {' '.join(command)} </dev/null"
    )


def _prepared(pipe: IO[bytes] | None) -> int:
    """Return the descriptor of a pipe, which never blocks."""
    assert pipe is not None, "asked of Popen"
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
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs inside the kernel, and ends when that does
        process.wait(_END_TIMEOUT_S)
