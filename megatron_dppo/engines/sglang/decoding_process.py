"""Decodes responses in a separate process, so that other threads of the trainer keep running.

Parsing the JSON of a long response holds the GIL: the trainer's CPU time for 16k tokens with top-20 and routes
is 27 ms (tools/benchmarks/README.md), and no other thread of the trainer runs meanwhile.

`DecodingProcess` starts this module as a worker (see `workers`), which imports no tensor library, so it starts
quickly. Its requests and replies carry only the sizes of pickles and of arrays in shared memory, one memory for
each direction. Both ends of the pickles are this package.
"""

import asyncio
import gc
import mmap
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Self

from megatron_dppo.engines.sglang.replies import Answer, Expected, Reader
from megatron_dppo.errors import ReplyError, RolloutError, RoutingReplayError
from megatron_dppo.workers.service import FileDigests, Service, WorkerFault
from megatron_dppo.workers.worker import run_worker
from megatron_dppo.workers.worker_process import WorkerLostError, WorkerProcess

_SMALL_BYTES = 64 * 1024  # the pipes cost the trainer 1 to 2 ms of CPU, like decoding about 50 kB
_TIMEOUT_S = 120.0  # of one response, pipes included; 16k tokens with top-20 and routes take under a second
_MOST_LOST = 2  # lost processes in a row that stop the run; the first one is replaced
_ARRIVED = list[int]()

SERVICE = Service[list[int], list[int]](
    module="megatron_dppo.engines.sglang.decoding_process",
    request=list[int],
    answer=list[int],
    key="rollout.sglang",
    noun="response decoder",
    option_prefix="rollout.sglang.",
    error=RolloutError,
    describe_request=str,
    fewer="the number of other processes",
    variables={"OPENBLAS_NUM_THREADS": "1"},  # numpy's thread pool is not needed
)
"""Requests and replies are sizes in bytes. The empty request asks for an empty reply: what was sent is read."""


class DecodingProcess:
    """Decodes responses in a worker process; safe for several threads and event loops at once.

    The process starts with the first large response. It ends with this process, even if this process is killed.
    Responses are decoded one after another, in the order of arrival. A process that is lost costs the response
    that it decodes, and none if it is idle.
    """

    def __init__(self, *, small_bytes: int = _SMALL_BYTES, timeout_s: float = _TIMEOUT_S) -> None:
        """Start nothing yet.

        Args:
            small_bytes: Responses smaller than this are decoded by the caller, which is faster than the pipes.
            timeout_s: Time limit for one response; a process that takes longer is killed.
        """
        self._small_bytes, self._timeout_s = small_bytes, timeout_s
        self._driver = ThreadPoolExecutor(1, "decoding")  # one thread, started when needed, owns the process
        self._child: _Child | None = None
        self._num_lost = 0  # processes lost since the last result

    async def read(self, reader: Reader, content: bytes, expected: Expected) -> Answer:
        """Parse a response with `reader`."""
        if len(content) < self._small_bytes:
            return reader(content, expected)
        return await asyncio.wrap_future(self._driver.submit(self._read_there, reader, content, expected))

    def _read_there(self, reader: Reader, content: bytes, expected: Expected) -> Answer:
        is_new, child = self._child is None, self._child or _Child()
        self._child = child
        try:
            answer = child.ask(reader, content, expected, self._timeout_s)
        except WorkerLostError as error:
            child.process.kill()
            self._child = None
            if not (is_new or child.has_request):  # lost while idle, and not by this response
                return self._read_there(reader, content, expected)
            self._num_lost += 1
            found = f"{expected.where}, {len(content)} bytes to decode: {error}"
            if self._num_lost >= _MOST_LOST:
                raise RolloutError(
                    f"{found}, like the process before it; expected arrays. Check the machine's memory: "
                    f"the kernel kills processes when memory runs out.{error.printed}"
                ) from None
            action = f"The next response starts another process.{error.printed}"
            raise ReplyError(f"{found}; expected arrays. {action}") from None
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


class _Child:
    """The worker process with its memory. Only one thread uses it.

    Attributes:
        has_request: Whether the process has read a request that it has not answered.
    """

    def __init__(self) -> None:
        """Start the process, and wait until it has imported its modules."""
        self.has_request = False
        try:
            self._requests, self._answers = SharedMemory.create(), SharedMemory.create()
        except OSError as error:
            raise SERVICE.shortage(error) from None
        descriptors = (self._requests.descriptor, self._answers.descriptor)
        name, files = ",".join(map(str, descriptors)), FileDigests()
        self.process = WorkerProcess(SERVICE, name, 0, _is_given_up, (), files, descriptors)
        weakref.finalize(self, self.process.kill).atexit = False  # at exit, its stdin closes, which ends it

    def ask(
        self, reader: Reader, content: bytes, expected: Expected, timeout_s: float
    ) -> Answer | ReplyError | RoutingReplayError:
        """Return the result of `reader`, or the error that it raised."""
        parts = [content, pickle.dumps((reader, expected))]
        self._requests.write(parts)
        for number, request in enumerate((_ARRIVED, [len(part) for part in parts])):
            self.process.send(number, request)
        self.process.receive(0, timeout_s, _is_given_up)
        self.has_request = True
        sizes = self.process.receive(1, timeout_s, _is_given_up)
        self.has_request = False
        if isinstance(sizes, WorkerFault):
            raise WorkerLostError(sizes.kind, f"its worker sent {sizes.message or sizes.kind}")
        answer, *buffers = self._answers.read(sizes)
        return pickle.loads(answer, buffers=buffers)


def _is_given_up() -> bool:
    """Return False: no response is given up while it is decoded."""
    return False


def load_decoder(name: str) -> Callable[[list[int]], list[int]]:
    """Return a function that decodes the request in shared memory; `name` has the two descriptors."""
    requests, answers = (SharedMemory(int(descriptor)) for descriptor in name.split(","))
    gc.disable()  # JSON has no reference cycles, and the search for them took a third of the time

    def answer(sizes: list[int]) -> list[int]:
        if sizes == _ARRIVED:
            return []
        parts = _decode(requests.view(sizes))
        answers.write(parts)
        return [memoryview(part).nbytes for part in parts]

    return answer


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


if __name__ == "__main__":
    run_worker(SERVICE, load_decoder)
