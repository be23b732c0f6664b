"""Frames between a trainer and its decoding process: a JSON header and raw bytes, never a pickle.

The header's length (8 bytes, little-endian) and the header go through a pipe. The buffers are stored one after
another in shared memory, with one `SharedMemory` per direction. The header has their sizes.
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
    """Memory that one process writes and another reads, in turns. It is an open file without a name.

    It keeps the size of its largest content, so only a larger content allocates memory.
    """

    def __init__(self, descriptor: int) -> None:
        """Use an open file, without owning it."""
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self:
        """Open a new file; the caller must call `close`."""
        if sys.platform == "linux":
            return cls(os.memfd_create("decoding"))
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    def close(self) -> None:
        """Close the file; the other process may still have it open."""
        os.close(self.descriptor)

    def write(self, buffers: Sequence[Buffer]) -> None:
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

    def view(self, size: int) -> memoryview:
        """Return a view of the first `size` bytes, valid until the other process writes."""
        if size == 0:
            return memoryview(b"")
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        return memoryview(self._mapped)[:size]


@dataclass(frozen=True)
class Frame:
    """One message to the other process."""

    header: bytes  # starts with its length
    buffers: Sequence[Buffer] = ()


def frame_of(header: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> Frame:
    """Return the frame of a JSON-serialisable header and buffers."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    text = json.dumps({**header, "sizes": sizes}).encode()
    return Frame(len(text).to_bytes(LENGTH_BYTES, "little") + text, buffers)


def header_length(start: Buffer) -> int:
    """Return the header's length in bytes from the first `LENGTH_BYTES` of a frame."""
    return int.from_bytes(start, "little")


def sizes_in(header: Mapping[str, Any]) -> list[int]:
    """Return the size of each buffer of a frame, in bytes."""
    return list(header["sizes"])


def answer_frame(answer: Answer) -> Frame:
    """Return the frame of a parsed response: arrays as buffers, all other fields in the header."""
    values = {each.name: getattr(answer, each.name) for each in fields(answer)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = {
        "kind": type(answer).__name__,
        "fields": {name: value for name, value in values.items() if name not in arrays},
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
    }
    return frame_of(header, [_bytes_of(array) for array in arrays.values()])


def fault_frame(error: ReplyError | RoutingReplayError) -> Frame:
    """Return the frame of a refused response: the error's type and message."""
    return frame_of({"error": type(error).__name__, "message": str(error)})


def read_answer(header: Mapping[str, Any], buffers: Sequence[bytearray]) -> Answer:
    """Return the parsed response of a frame.

    Raises:
        ReplyError: The response was refused.
        RoutingReplayError: Its routes were refused.
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
    """Replace lists with tuples, which JSON had turned into lists."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value
