"""Decodes responses in a separate process, so that other threads of the trainer keep running.

Parsing the JSON of a long response holds the GIL: the trainer's CPU time for 16k tokens with top-20 and routes
is 27 ms (tools/benchmarks/README.md), and no other thread of the trainer runs meanwhile.

`DecodingProcess` starts this module as a program, which imports no tensor library, so it starts quickly.
Requests and results are pickles, since both ends are this package. They are in shared memory, one for each
direction, together with the bytes of the response or its arrays. The pipes carry only the sizes of these parts.
"""

import asyncio
import contextlib
import gc
import json
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Self

from megatron_dppo.engines.sglang.replies import Answer, Expected, Reader
from megatron_dppo.errors import ReplyError, RolloutError, RoutingReplayError
from megatron_dppo.runtime.framing import FrameReader, json_frame, read_message, write_frame

_MODULE = "megatron_dppo.engines.sglang.decoding_process"
_SMALL_BYTES = 64 * 1024  # the pipes cost the trainer 1 to 2 ms of CPU, like decoding about 50 kB
_TIMEOUT_S = 120.0  # of one response, pipes included; 16k tokens with top-20 and routes take under a second
_START_TIMEOUT_S = 300.0  # imports may be slow on a slow disk
_END_TIMEOUT_S = 10.0  # until a process that closed its pipes, or was killed, has ended on a busy machine
_MOST_LOST = 2  # lost children in a row that stop the run; the first one is replaced
_PARENT_EVERY_S = 0.25
_MAX_SIZES = 4096  # bytes


class DecodingProcess:
    """Decodes responses in a child process; safe for several threads and event loops at once.

    The child starts with the first large response. It ends with this process, even if this process is killed.
    Responses are decoded one after another, in the order of arrival. A child that is lost costs the response
    that it decodes, and none if it is idle.
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

    async def read(self, reader: Reader, content: bytes, expected: Expected) -> Answer:
        """Parse a response with `reader`."""
        if len(content) < self._small_bytes:
            return reader(content, expected)
        return await asyncio.wrap_future(self._driver.submit(self._read_there, reader, content, expected))

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while no child runs."""
        child = self._child
        return None if child is None else child.process.pid

    def _read_there(self, reader: Reader, content: bytes, expected: Expected) -> Answer:
        is_new, child = self._child is None, self._child or _Child()
        self._child = child
        try:
            answer = child.ask(reader, content, expected, self._timeout_s)
        except _LostError as error:
            _kill(child.process)
            self._child = None
            if not (is_new or child.has_request):  # lost while idle, and not by this response
                return self._read_there(reader, content, expected)
            self._num_lost += 1
            found = f"{expected.where}: found that the process decoding its {len(content)} bytes {error}"
            if self._num_lost >= _MOST_LOST:
                raise RolloutError(
                    f"{found}, like the process before it; expected arrays. Check what both printed, and "
                    "the machine's memory: the kernel kills processes when memory runs out."
                ) from None
            raise ReplyError(f"{found}; expected arrays. The next response starts another process.") from None
        self._num_lost = 0
        if isinstance(answer, Exception):
            raise answer
        return answer


class SharedMemory:
    """Memory that one process writes and another reads, in turns. It is an open file without a name.

    It never shrinks, so only a larger content allocates memory.
    """

    def __init__(self, descriptor: int) -> None:
        """Own an open file, until this object is deleted."""
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls) -> Self:
        """Open a new file."""
        if sys.platform == "linux":
            return cls(os.memfd_create("decoding"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Replace the content with these buffers, one after another."""
        offset = 0
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num_written = os.pwrite(self.descriptor, left, offset)
                left, offset = left[num_written:], offset + num_written

    def read(self, sizes: Sequence[int]) -> list[bytearray]:
        """Return copies of the buffers with these sizes in bytes, without the GIL during the copy."""
        buffers, offset = [bytearray(size) for size in sizes], 0
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num_read = os.preadv(self.descriptor, [left], offset)
                if num_read == 0:
                    raise EOFError
                left, offset = left[num_read:], offset + num_read
        return buffers

    def view(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return views of the buffers with these sizes in bytes, valid until the other process writes."""
        if self._mapped is None or len(self._mapped) < sum(sizes):
            self._mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        whole, ends = memoryview(self._mapped), list(accumulate(sizes))
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class _LostError(Exception):
    """The child is lost; the message is a verb phrase that tells how it ended."""


class _Child:
    """The child process with its memory and pipes. Only one thread uses it.

    Attributes:
        has_request: Whether the process has read a request that it has not answered.
    """

    def __init__(self) -> None:
        """Start the process, and wait until it has imported its modules."""
        self.has_request = False
        command = [sys.executable, "-m", _MODULE]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy's thread pool is not needed
        pipe = subprocess.PIPE
        try:
            self._requests, self._answers = SharedMemory.create(), SharedMemory.create()
            descriptors = [self._requests.descriptor, self._answers.descriptor]
            command += map(str, (os.getpid(), *descriptors))
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                bufsize=0,
                pass_fds=descriptors,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise _start_error(f"raised {error}", command) from None
        weakref.finalize(self, _kill, self.process).atexit = False  # at exit, its stdin closes, which ends it
        assert self.process.stdin is not None and self.process.stdout is not None, "Popen was called with pipes"
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._reader, self._received, self._poll = FrameReader(_MAX_SIZES), deque[bytes](), select.poll()
        self._poll.register(self._out, select.POLLIN)
        try:
            self._receive(time.monotonic() + _START_TIMEOUT_S, _START_TIMEOUT_S)
        except _LostError as error:
            _kill(self.process)
            raise _start_error(str(error), command) from None

    def ask(
        self, reader: Reader, content: bytes, expected: Expected, timeout_s: float
    ) -> Answer | ReplyError | RoutingReplayError:
        """Return the result of `reader`, or the error that it raised."""
        deadline = time.monotonic() + timeout_s
        parts = [content, pickle.dumps((reader, expected))]
        self._requests.write(parts)
        with contextlib.suppress(BrokenPipeError):  # `_receive` tells how the process ended
            os.write(self._in, json_frame([len(part) for part in parts]))
        self._receive(deadline, timeout_s)
        self.has_request = True
        sizes = self._receive(deadline, timeout_s)
        self.has_request = False
        answer, *buffers = self._answers.read(sizes)
        return pickle.loads(answer, buffers=buffers)

    def _receive(self, deadline: float, timeout_s: float) -> list[int]:
        """Return the sizes of the parts of the process's next message: none if it has read a request."""
        while not self._received:
            if not self._poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise _LostError(f"returned no result within {timeout_s:g} s")
            data = os.read(self._out, 1 << 16)
            if not data:
                raise _LostError(self._how_it_ended())
            self._received += self._reader.feed(data)
        return json.loads(self._received.popleft())

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its pipes"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"


def _start_error(found: str, command: list[str]) -> RolloutError:
    return RolloutError(
        f"the process that decodes responses: found that it {found} at its start; expected it to wait for "
        f"responses. Free memory or processes on this machine, or try: {' '.join(command)} </dev/null"
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process; may be called twice."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a kernel call ends after the call
        process.wait(_END_TIMEOUT_S)


def _run_child(parent: int, requests: SharedMemory, answers: SharedMemory) -> None:
    """Decode responses until stdin ends or the trainer, process `parent`, is gone."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of the job; the trainer decides
    gc.disable()  # JSON has no reference cycles, and the search for them took a third of the time
    stdin, stdout = open(0, "rb", closefd=False), open(os.dup(1), "wb")  # noqa: PTH123, SIM115
    os.dup2(2, 1)  # a library's output must not mix with frames
    ready = json_frame([])
    write_frame(stdout, ready)
    while (message := read_message(stdin)) is not None:
        write_frame(stdout, ready)
        parts = _decode(requests.view(json.loads(message)))
        answers.write(parts)
        write_frame(stdout, json_frame([memoryview(part).nbytes for part in parts]))
        del parts


def _decode(request: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Return the pickle of a request's result, and the result's arrays."""
    content, rest = request
    reader, expected = pickle.loads(rest)
    try:
        answer = reader(content, expected)
    except (ReplyError, RoutingReplayError) as error:
        answer = error.with_traceback(None)  # its frames refer to this variable, and nothing collects cycles
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
    return [text, *(buffer.raw() for buffer in buffers)]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY_S)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the trainer is gone
        _run_child(int(sys.argv[1]), *map(SharedMemory, map(int, sys.argv[2:])))
