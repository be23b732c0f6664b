"""Encodes messages between a trainer and its workers: one line of JSON each, never a pickle.

Requests are numbered and replies repeat the number, so that a stray line never becomes the reply to another
request.
"""

import json
from typing import Any, cast

from megatron_dppo.workers.service import Fields, WorkerFault

OUT_OF_MEMORY = b'{"out_of_memory": true}\n'
"""The last reply of a worker, encoded in advance, because nothing can be allocated when it is needed."""


def hello_line(problem: str | None) -> bytes:
    """Return a worker's first line: the reason why the user's code could not be loaded, or None."""
    return _line_of({"problem": problem})


def read_hello(line: bytes) -> str | None:
    """Return the problem in a worker's first line, or None if the worker is ready.

    Raises:
        ValueError: It is not a valid first line.
    """
    return cast("str | None", _read(line, "problem")["problem"])


def request_line(number: int, request: Fields) -> bytes:
    """Return the line of a numbered request."""
    return _line_of({"number": number, "request": request})


def read_request(line: bytes) -> tuple[int, Fields]:
    """Read a request's number and fields."""
    message = _read(line, "number", "request")
    return message["number"], message["request"]


def answer_line(number: int, answer: Fields) -> bytes:
    """Return the line of a reply to a numbered request."""
    return _line_of({"number": number, "answer": answer})


def fault_line(number: int, message: str) -> bytes:
    """Return the line with the reason why the user's code failed for a request."""
    return _line_of({"number": number, "failed": message})


def read_answer(line: bytes, number: int) -> Fields | WorkerFault:
    """Return the fields of the reply to request `number`, or its fault.

    Raises:
        ValueError: The line is not a reply to this request.
    """
    if line == OUT_OF_MEMORY.rstrip():
        return WorkerFault("out_of_memory", "")
    message = _read(line, "number")
    if message["number"] != number:
        raise ValueError(f"a reply to request {message['number']} instead of {number}")
    if "failed" in message:
        return WorkerFault("failed", message["failed"])
    return require_keys(require_keys(message, "answer")["answer"])


def require_keys(content: Any, *keys: str) -> Fields:
    """Return a message's fields after checking that they have these keys.

    Raises:
        ValueError: A key is missing, or the message is not a JSON object.
    """
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise ValueError(f"{str(cast(object, content))[:80]!r}, which lacks one of {keys}")
    return cast(Fields, content)


def _line_of(message: Fields) -> bytes:
    return json.dumps(message).encode() + b"\n"  # ASCII, so no character of a response ends the line


def _read(line: bytes, *keys: str) -> Fields:
    return require_keys(json.loads(line), *keys)
