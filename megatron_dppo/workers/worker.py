"""The main loop of a worker process: loads user code, limits its memory, and runs it for each request.

It writes one message to stdout for each message of stdin, in order. A first message reports whether the code
could be loaded. It imports no tensor library, so it starts quickly, and it shares no state with the trainer.

There are two processes. The process that the trainer starts runs no user code. It waits for its child, ends in
the same way as the child, and kills the process group when the trainer is gone. The child could not do this
itself, because a backtracking regular expression blocks the interpreter, and so all its threads, for hours.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.runtime.framing import read_message, write_frame
from megatron_dppo.runtime.user_code import FilesRead, describe_error
from megatron_dppo.workers.service import LOADED, OUT_OF_MEMORY, A, Q, Reply, Service, decode, encode

_MAX_MESSAGE = 2000  # characters of a fault's message
_PARENT_EVERY_S = 0.25
_STATUS = Path("/proc/self/status")


def run_worker(service: Service[Q, A], load: Callable[[str], Callable[[Q], A]]) -> None:
    """Serve until stdin ends, or the process that started this one is gone.

    The program's arguments are the name of the user's code, and the memory in MB that the code may allocate
    after its import; 0 is no limit.

    Args:
        service: Kind of worker.
        load: Function that imports the user's code by its name, and returns the function from a request to its
            reply. If that raises a MegatronDppoError, only this request fails, and the error's message is
            its fault. Any other exception also ends the worker; a MemoryError is reported as `out_of_memory`.
    """
    name, memory_mb = sys.argv[1], int(sys.argv[2])
    trainer = os.getppid()
    if os.getpgrp() != os.getpid():
        os.setsid()  # started by hand: never kill another process group
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        # Signals go to all processes of a job, and the trainer decides. User programs would inherit SIG_IGN.
        signal.signal(number, _pass_over)
    child = os.fork()
    if child:
        _guard(child, trainer)
    requests, replies = _take_pipes()
    faulthandler.enable(all_threads=False)  # a crash prints its stack to stderr
    answer, problem, files = None, None, FilesRead()
    try:
        answer = load(name)
    except MegatronDppoError as error:
        problem = str(error)
    except BaseException as error:  # noqa: BLE001 - the user's module may raise anything while it is imported
        traceback.print_exc()
        problem = f"{service.key}: {name!r} cannot be imported: it raised {describe_error(error)}"
    if answer is not None:
        _limit_memory(memory_mb)
    write_frame(replies, encode(Reply(LOADED, files.take(), failed=problem)))
    if answer is not None:
        _serve(lambda message: _reply(service, answer, files, message), requests, replies)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def _guard(child: int, trainer: int) -> None:
    """End like the child, and end the child and its processes when the trainer has ended. Never returns."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):  # only the child keeps the pipes open, so the trainer sees at once when it dies
        os.dup2(nowhere, number)
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # one core is enough
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to remove
            signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    os._exit(abs(code))


def _end_with(trainer: int) -> None:
    while os.getppid() == trainer:
        time.sleep(_PARENT_EVERY_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take stdin and stdout for the protocol; user code then reads nothing, and prints to stderr."""
    requests, replies, nowhere = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def leave() -> None:
        """Close the pipes in a process that user code forks."""
        os.dup2(nowhere, requests, inheritable=False)
        os.dup2(nowhere, replies, inheritable=False)

    os.register_at_fork(after_in_child=leave)
    return open(requests, "rb"), open(replies, "wb")  # noqa: PTH123 - for the life of the process


def _serve(reply_to: Callable[[bytes], bytes], requests: BinaryIO, replies: BinaryIO) -> None:
    while True:
        try:
            message = read_message(requests)
            if message is None:
                return
            reply = reply_to(message)
        except MemoryError:
            reply = OUT_OF_MEMORY
        # The exception is gone here, so the memory of the user's frames is free again.
        if reply is OUT_OF_MEMORY:
            _lift_memory_limit()
        write_frame(replies, reply)
        if reply is OUT_OF_MEMORY:
            return  # memory that is still in use would fail the next request too


def _reply(service: Service[Q, A], answer: Callable[[Q], A], files: FilesRead, message: bytes) -> bytes:
    fields: dict[str, Any] = json.loads(message)
    found, failed = None, None
    try:
        found = answer(decode(fields["request"], service.request))
    except MegatronDppoError as error:
        failed = str(error)[:_MAX_MESSAGE]
    return encode(Reply(fields["number"], files.take(), found, failed))


def _limit_memory(memory_mb: int) -> None:
    """Let allocations of more than `memory_mb` in addition to current use raise MemoryError, on Linux."""
    if memory_mb == 0 or not _STATUS.exists():
        return
    used_kb = next(
        int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith("VmData")
    )
    limit, most = used_kb * 1024 + memory_mb * (1 << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _lift_memory_limit() -> None:
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
