"""Frames messages on pipes and sockets: a length of 4 bytes, little-endian, then the content.

The content is JSON if the other end may run a user's code or be any peer. Only processes that run nothing but
this package send each other pickles.
"""

import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<I")


def frame_of(content: bytes) -> bytes:
    """Return the frame of a message."""
    return _LENGTH.pack(len(content)) + content


def json_frame(message: Any) -> bytes:
    """Return the frame of a message in JSON."""
    return frame_of(json.dumps(message).encode())


class FrameReader:
    """Splits received bytes into messages, for pipes and sockets that are read without blocking."""

    def __init__(self, max_bytes: int) -> None:
        """Set the largest message, in bytes."""
        self._max_bytes, self._received = max_bytes, bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes."""
        self._received += data
        messages: list[bytes] = []
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size > self._max_bytes and not messages:  # else the next call raises
                raise ValueError(f"a message of {size} bytes; expected at most {self._max_bytes}")
            end = _LENGTH.size + size
            if size > self._max_bytes or len(self._received) < end:
                break
            messages.append(bytes(self._received[_LENGTH.size : end]))
            del self._received[:end]
        return messages


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the next message of a blocking stream; None at the end of the stream."""
    start = stream.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(start)
    content = stream.read(size)
    return content if len(content) == size else None


def write_frame(stream: BinaryIO, frame: bytes) -> None:
    """Write a frame to a blocking stream, and flush it."""
    stream.write(frame)
    stream.flush()
