"""Program of the process that decodes responses: `python -m` this module with three numbers.

The numbers are the trainer's process id and the file descriptors of the shared memory for requests and for
replies. For each frame header (`decoding_wire`) on stdin, the program writes one to stdout, until the trainer
is gone. It imports no tensor library, so that it starts quickly and stays small.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from megatron_dppo.engines.sglang.decoding_wire import (
    LENGTH_BYTES,
    Frame,
    SharedMemory,
    answer_frame,
    fault_frame,
    frame_of,
    header_length,
    sizes_in,
)
from megatron_dppo.engines.sglang.replies import READERS, Expected
from megatron_dppo.errors import ReplyError, RoutingReplayError

_PARENT_EVERY_S = 0.25


def main() -> None:
    """Decode responses until stdin ends or the trainer is gone."""
    parent, *memory = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of the job; the trainer decides
    gc.disable()  # JSON has no reference cycles, and the search for them took a third of the time
    contents, arrays = map(SharedMemory, memory)
    requests, replies = open(0, "rb", closefd=False), open(os.dup(1), "wb")  # noqa: PTH123, SIM115
    os.dup2(2, 1)  # a library's output must not mix with frames
    _send(replies, arrays, frame_of({}))
    while (header := _receive(requests)) is not None:
        (size,) = sizes_in(header)
        try:
            expected = Expected.of_json(header["expected"])
            frame = answer_frame(READERS[header["reader"]](contents.view(size), expected))
        except (ReplyError, RoutingReplayError) as error:
            frame = fault_frame(error)
        _send(replies, arrays, frame)
        del frame


def _receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Return the header of the next request, or None after the last one."""
    start = stream.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        return None
    size = header_length(start)
    text = stream.read(size)
    return None if len(text) < size else json.loads(text)


def _send(stream: BinaryIO, memory: SharedMemory, frame: Frame) -> None:
    memory.write(frame.buffers)
    stream.write(frame.header)
    stream.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_EVERY_S)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(0)  # the trainer is gone
