"""Frames between a trainer and its decoding process: a header of JSON, and raw bytes; never a pickle.

The length of the header (8 bytes, little-endian) and the header go through a pipe. Its buffers lie one after
another in memory that both processes see, a `SharedMemory` each way; the header says how long they are.
"""

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from megatron_dppo.engines.sglang.replies import Answer, PromptScores, Reply
from megatron_dppo.errors import MegatronDppoError, ReplyError, RoutingReplayError

LENGTH_BYTES = 8
Buffer = bytes | bytearray | memoryview

_KINDS: Mapping[str, type[Answer]] = {"Reply": Reply, "PromptScores": PromptScores}
_ERRORS: Mapping[str, type[MegatronDppoError]] = {
    "ReplyError": ReplyError,
    "RoutingReplayError": RoutingReplayError,
}


class SharedMemory:
    """Memory that one process writes and another reads, in turns: an open file that has no name.

    It stays as large as its largest content was, so that only larger ones have to find memory.
    """

    def __init__(self, descriptor: int) -> None:
        """Use an open file, of which this object does not become the owner."""
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self:
        """Open a new one, to be closed by `close`."""
        if sys.platform == "linux":
            return cls(os.memfd_create("decoding"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """Close the file; the other process may have it open still."""
        os.close(self.descriptor)

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Replace the content by these buffers, one after another."""
        offset = 0
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num_written = os.pwrite(self.descriptor, left, offset)
                left, offset = left[num_written:], offset + num_written

    def read(self, sizes: Sequence[int]) -> list[bytearray]:
        """Return copies of buffers of so many bytes, without the interpreter's lock while they are copied."""
        buffers, offset = [bytearray(size) for size in sizes], 0
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num_read = os.preadv(self.descriptor, [left], offset)
                if num_read == 0:
                    raise EOFError
                left, offset = left[num_read:], offset + num_read
        return buffers

    def view(self, size: int) -> memoryview:
        """Return the first `size` bytes as they lie there: valid until the other process writes."""
        if size == 0:
            return memoryview(b"")
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        return memoryview(self._mapped)[:size]


@dataclass(frozen=True)
class Frame:
    """What goes to the other process at once."""

    header: bytes  # its length before it
    buffers: Sequence[Buffer] = ()


def frame_of(header: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> Frame:
    """Return the frame of a header that JSON can hold, and of buffers."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    text = json.dumps({**header, "sizes": sizes}).encode()
    return Frame(len(text).to_bytes(LENGTH_BYTES, "little") + text, buffers)


def header_length(start: Buffer) -> int:
    """Return the bytes of the header from the first `LENGTH_BYTES` of a frame."""
    return int.from_bytes(start, "little")


def sizes_in(header: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each buffer of a frame."""
    return list(header["sizes"])


def answer_frame(answer: Answer) -> Frame:
    """Return the frame of an answer: its arrays as buffers, all else in the header."""
    values = {each.name: getattr(answer, each.name) for each in fields(answer)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = {
        "kind": type(answer).__name__,
        "fields": {name: value for name, value in values.items() if name not in arrays},
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
    }
    return frame_of(header, [_bytes_of(array) for array in arrays.values()])


def fault_frame(error: ReplyError | RoutingReplayError) -> Frame:
    """Return the frame of an answer that was refused."""
    return frame_of({"error": type(error).__name__, "message": str(error)})


def read_answer(header: Mapping[str, Any], buffers: Sequence[bytearray]) -> Answer:
    """Return the answer in a frame.

    Raises:
        ReplyError: It was refused.
        RoutingReplayError: Its routes were.
    """
    if "error" in header:
        raise _ERRORS[header["error"]](header["message"])
    arrays: dict[str, Any] = {
        name: np.frombuffer(buffer, dtype).reshape(shape)
        for (name, dtype, shape), buffer in zip(header["arrays"], buffers, strict=True)
    }
    rest = {name: _without_lists(value) for name, value in header["fields"].items()}
    return _KINDS[header["kind"]](**rest, **arrays)


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _without_lists(value: Any) -> Any:
    """Return tuples in place of lists, as they were before JSON."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value
