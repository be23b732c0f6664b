"""Frames between a trainer and its decoding process: a header of JSON, then raw bytes; never a pickle.

A frame is the length of its header (8 bytes, little-endian), the header, and its buffers one after another; the
header says how long they are.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from megatron_dppo.errors import MegatronDppoError, ReplyError, RoutingReplayError
from megatron_dppo.rollout.sglang.replies import Answer, PromptScores, Reply

LENGTH_BYTES = 8
Buffer = bytes | bytearray | memoryview

_KINDS: Mapping[str, type[Answer]] = {"Reply": Reply, "PromptScores": PromptScores}
_ERRORS: Mapping[str, type[MegatronDppoError]] = {
    "ReplyError": ReplyError,
    "RoutingReplayError": RoutingReplayError,
}


def frame_of(header: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the parts of a frame, in order."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    text = json.dumps({**header, "sizes": sizes}).encode()
    return [len(text).to_bytes(LENGTH_BYTES, "little") + text, *buffers]


def header_length(start: Buffer) -> int:
    """Return the bytes of the header from the first `LENGTH_BYTES` of a frame."""
    return int.from_bytes(start, "little")


def sizes_in(header: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each buffer of a frame."""
    return list(header["sizes"])


def answer_frame(answer: Answer) -> list[Buffer]:
    """Return the frame of an answer: its arrays as buffers, all else in the header."""
    values = {each.name: getattr(answer, each.name) for each in fields(answer)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    header = {
        "kind": type(answer).__name__,
        "fields": {name: value for name, value in values.items() if name not in arrays},
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays.items()],
    }
    return frame_of(header, [array.tobytes() for array in arrays.values()])


def fault_frame(error: ReplyError | RoutingReplayError) -> list[Buffer]:
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


def _without_lists(value: Any) -> Any:
    """Return tuples in place of lists, as they were before JSON."""
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value
