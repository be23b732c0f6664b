"""Describes a kind of worker: its program, the types of its requests and replies, and its keys in the config.

Messages are frames of JSON, never pickles. Requests are `{"number": ..., "request": ...}`. A worker's messages
are the fields of a `Reply`. The first one, number -1, tells whether it could load the user's code. The others
repeat a request's number, so that a stray message never becomes the reply to another request.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec

from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.runtime.framing import json_frame

WorkerFaultKind = Literal["failed", "timed_out", "out_of_memory"]

Q = TypeVar("Q")  # request
A = TypeVar("A")  # reply


@dataclass(frozen=True)
class WorkerFault:
    """The reason why a request has no reply."""

    kind: WorkerFaultKind
    message: str


@dataclass(frozen=True)
class Service(Generic[Q, A]):
    """A kind of worker.

    Requests and replies are JSON values and dataclasses of JSON values.

    Attributes:
        module: Program, run as `python -m MODULE NAME MEMORY_MB`; it calls `worker.run_worker`.
        request: Type of a request.
        answer: Type of a reply.
        key: Config key of the user's code.
        noun: Noun for the user's code in messages.
        option_prefix: Prefix of the config keys `workers`, `timeout_s` and `memory_mb`.
        fewer: What to lower for fewer processes; default: the key `workers`.
        error: Error that stops a run: the code cannot be loaded, or its requests time out.
        describe_request: Returns the name of a request for messages.
        variables: Environment variables that its workers get in addition to the trainer's common ones.
    """

    module: str
    request: type[Q]
    answer: type[A]
    key: str
    noun: str
    option_prefix: str
    error: type[MegatronDppoError]
    describe_request: Callable[[Q], str]
    fewer: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def shortage(self, error: OSError) -> MegatronDppoError:
        """Return the error of a machine that cannot start a worker."""
        option = self.fewer or f"{self.option_prefix}workers"
        action = f"Free memory or processes, raise the limits of this machine (ulimit), or lower {option}."
        return self.error(f"{self.noun} worker: found {error}; expected a new process. {action}")


FileDigests = set[tuple[str, str]]
"""Path and `user_code.digest_of` of files that workers have read."""
LOADED = -1
"""Number of a worker's first message."""


@dataclass(frozen=True)
class Reply:
    """A worker's message: a reply, or why there is none, and the files read since its last message."""

    number: int
    files: FileDigests
    answer: Any = None
    failed: str | None = None


OUT_OF_MEMORY = json_frame({"out_of_memory": True})
"""The last message of a worker, encoded in advance, because nothing can be allocated when it is needed."""


def encode(message: Any) -> bytes:
    """Return the frame of a message of dataclasses and JSON values."""
    return json_frame(msgspec.to_builtins(message))


def decode(fields: Any, kind: type[A]) -> A:
    """Return the value of a type that has these fields."""
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, AssertionError) as error:  # a type's own assertions included
        raise ValueError(f"{str(fields)[:80]!r}: {error}") from error


def read_reply(content: bytes, number: int, kind: type[A], files: FileDigests) -> A | WorkerFault:
    """Return the reply to request `number`, or its fault; add its files to `files`."""
    fields = json.loads(content)
    if fields == {"out_of_memory": True}:
        return WorkerFault("out_of_memory", "")
    reply = decode(fields, Reply)
    if reply.number != number:
        raise ValueError(f"a reply to request {reply.number} instead of {number}")
    files.update(reply.files)
    return decode(reply.answer, kind) if reply.failed is None else WorkerFault("failed", reply.failed)
