"""Describes a kind of worker: its program, its requests and replies, and its keys in the config.

Messages are frames of JSON. A worker first sends `{"problem": ...}`: why it could not load the user's code, or
null. Requests are `{"number": ..., "request": ...}`. Replies repeat the number and have `"answer"` or
`"failed"`, so that a stray message never becomes the reply to another request. Both kinds of message have
`"files"`: path and digest of each file that the worker has read since its last message.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from megatron_dppo.errors import MegatronDppoError
from megatron_dppo.runtime.framing import json_frame

Fields = dict[str, Any]
"""A request or a reply between a trainer and its workers, as a JSON object."""
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

    Attributes:
        module: Program, run as `python -m MODULE NAME MEMORY_MB`; it calls `worker.run_worker`.
        key: Config key of the user's code.
        noun: Noun for the user's code in messages.
        option_prefix: Prefix of the config keys `workers`, `timeout_s` and `memory_mb`.
        fewer: What to lower for fewer processes; default: the key `workers`.
        error: Error that stops a run: the code cannot be loaded, or its requests time out.
        describe_request: Returns the name of a request for messages.
        encode_request: Returns a request's fields.
        decode_answer: Returns the reply that has these fields; raises ValueError if they are invalid.
    """

    module: str
    key: str
    noun: str
    option_prefix: str
    error: type[MegatronDppoError]
    describe_request: Callable[[Q], str]
    encode_request: Callable[[Q], Fields]
    decode_answer: Callable[[Fields], A]
    fewer: str = ""


OUT_OF_MEMORY = json_frame({"out_of_memory": True})
"""The last message of a worker, encoded in advance, because nothing can be allocated when it is needed."""


FileDigests = set[tuple[str, str]]
"""Path and `user_code.digest_of` of files that workers have read."""


def read_answer(content: bytes, number: int, files: FileDigests) -> Fields | WorkerFault:
    """Return the fields of the reply to request `number`, or its fault; add its files to `files`.

    Raises:
        ValueError: The message is not a reply to this request.
    """
    message = require_keys(json.loads(content))
    if message == {"out_of_memory": True}:
        return WorkerFault("out_of_memory", "")
    if require_keys(message, "number")["number"] != number:
        raise ValueError(f"a reply to request {message['number']} instead of {number}")
    add_files(message, files)
    if "failed" in message:
        return WorkerFault("failed", message["failed"])
    return require_keys(require_keys(message, "answer")["answer"])


def add_files(message: Fields, files: FileDigests) -> None:
    """Add the files that a message names to `files`.

    Raises:
        ValueError: The message names none.
    """
    files.update((str(path), str(digest)) for path, digest in require_keys(message, "files")["files"])


def require_keys(content: Any, *keys: str) -> Fields:
    """Return a message's fields after checking that they have these keys.

    Raises:
        ValueError: A key is missing, or the message is not a JSON object.
    """
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise ValueError(f"{str(cast(object, content))[:80]!r}, which lacks one of {keys}")
    return cast(Fields, content)
