"""Frames messages between a trainer and its workers: one line of JSON each, never a pickle.

Requests are numbered and answers repeat the number: a line that went astray must not become the answer to
another request.
"""

import json
from typing import Any, cast

from megatron_dppo.workers.service import Fields, WorkerFault

OUT_OF_MEMORY = b'{"out_of_memory": true}\n'
"""The last answer of a worker, made beforehand: nothing may be allocated any more when it is needed."""


def hello_line(problem: str | None) -> bytes:
    """Return a worker's first line: it is ready, or why the user's code could not be loaded."""
    return _line_of({"problem": problem})


def read_hello(line: bytes) -> str | None:
    """Return the problem in a worker's first line; none where it is ready.

    Raises:
        ValueError: This is no first line.
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
    """Return the line that answers a request."""
    return _line_of({"number": number, "answer": answer})


def fault_line(number: int, message: str) -> bytes:
    """Return the line that says why the user's code gave a request no answer."""
    return _line_of({"number": number, "failed": message})


def read_answer(line: bytes, number: int) -> Fields | WorkerFault:
    """Read the fields of the answer to request `number`, or why it has none.

    Raises:
        ValueError: This is no answer to it.
    """
    if line == OUT_OF_MEMORY.rstrip():
        return WorkerFault("out_of_memory", "")
    message = _read(line, "number")
    if message["number"] != number:
        raise ValueError(f"an answer to request {message['number']}, where {number} was due")
    if "failed" in message:
        return WorkerFault("failed", message["failed"])
    return require_keys(require_keys(message, "answer")["answer"])


def require_keys(content: Any, *keys: str) -> Fields:
    """Return a message's fields, once they are known to hold these keys.

    Raises:
        ValueError: They lack one, or are no fields.
    """
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise ValueError(f"{str(cast(object, content))[:80]!r}, which lacks one of {keys}")
    return cast(Fields, content)


def _line_of(message: Fields) -> bytes:
    return json.dumps(message).encode() + b"\n"  # ASCII: no character of a response ends the line


def _read(line: bytes, *keys: str) -> Fields:
    return require_keys(json.loads(line), *keys)
