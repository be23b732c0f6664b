"""The program of the process that decodes answers: `python -m` this module, and the trainer's process id.

It reads frames (`decoding_wire`) from stdin, and writes one to stdout for each, until the trainer is gone. It
imports no tensor library: it starts in a moment, and is small.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any, BinaryIO

from megatron_dppo.errors import ReplyError, RoutingReplayError
from megatron_dppo.rollout.sglang.decoding_wire import (
    LENGTH_BYTES,
    Buffer,
    answer_frame,
    fault_frame,
    frame_of,
    header_length,
    sizes_in,
)
from megatron_dppo.rollout.sglang.replies import READERS, Expected

_PARENT_EVERY_S = 0.25


def main() -> None:
    """Decode until stdin ends, or the trainer is gone."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole job, and the trainer decides
    gc.disable()  # what JSON holds has no cycles, and a third of the time went into looking for them
    requests, replies = open(0, "rb", closefd=False), open(os.dup(1), "wb")  # noqa: PTH123, SIM115
    os.dup2(2, 1)  # what a library prints is no frame
    _send(replies, frame_of({}))
    while (request := _receive(requests)) is not None:
        header, content = request
        try:
            frame = answer_frame(READERS[header["reader"]](content, Expected.of_json(header["expected"])))
        except (ReplyError, RoutingReplayError) as error:
            frame = fault_frame(error)
        _send(replies, frame)
        del request, content, frame


def _receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Return header and buffer of a request; none where there are no more."""
    start = stream.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        return None
    header = json.loads(stream.read(header_length(start)))
    (size,) = sizes_in(header)
    content = stream.read(size)
    return None if len(content) < size else (header, content)


def _send(stream: BinaryIO, frame: list[Buffer]) -> None:
    for part in frame:
        stream.write(part)
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
