"""The protocol between a trainer and its reward workers: one line of JSON per message, never a pickle.

Requests are numbered and replies repeat the number: a line that went astray must not become another response's
reward.
"""

import json
from typing import Any, cast

from megatron_dppo.rewards.base import RewardFault, RewardRequest, RewardResult
from megatron_dppo.types import Prompt

OUT_OF_MEMORY = b'{"out_of_memory": true}\n'
"""The last reply of a worker, made beforehand: nothing may be allocated any more when it is needed."""


def hello_line(problem: str | None) -> bytes:
    """Return a worker's first line: it is ready, or why the reward could not be loaded."""
    return line_of({"problem": problem})


def read_hello(line: bytes) -> str | None:
    """Return the problem that a worker's first line tells; none where it is ready.

    Raises:
        ValueError: This is no first line.
    """
    return cast("str | None", fields_of(line, "problem")["problem"])


def request_line(number: int, request: RewardRequest) -> bytes:
    """Return the line that asks for the score of a response."""
    content = {"prompt": vars(request.prompt), "response": request.response, "finish": request.finish_reason}
    return line_of({"number": number, **content})


def read_request(line: bytes) -> tuple[int, RewardRequest]:
    """Read a request and its number."""
    fields = fields_of(line, "number", "prompt", "response", "finish")
    prompt = fields["prompt"]
    if prompt["messages"] is not None:
        prompt["messages"] = tuple(prompt["messages"])
    return fields["number"], RewardRequest(Prompt(**prompt), fields["response"], fields["finish"])


def verdict_line(number: int, verdict: RewardResult | RewardFault) -> bytes:
    """Return the line that answers a request; a fault is the reward's failure."""
    if isinstance(verdict, RewardFault):
        return line_of({"number": number, "failed": verdict.message})
    return line_of({"number": number, "value": verdict.value, "info": dict(verdict.info)})


def read_verdict(line: bytes, number: int) -> RewardResult | RewardFault:
    """Read the answer to request `number`.

    Raises:
        ValueError: This is none.
    """
    found = fields_of_answer(line, number)
    return found if isinstance(found, RewardFault) else RewardResult(found["value"], found["info"])


def fields_of_answer(line: bytes, number: int) -> dict[str, Any] | RewardFault:
    """Read the fields of the answer to request `number`, or its fault; all services' workers share this.

    Raises:
        ValueError: This is no answer to it.
    """
    if line == OUT_OF_MEMORY.rstrip():
        return RewardFault("reward_out_of_memory", "")
    fields = fields_of(line, "number")
    if fields["number"] != number:
        raise ValueError(f"an answer to request {fields['number']}, where {number} was due")
    if "failed" in fields:
        return RewardFault("reward_failed", fields["failed"])
    return fields


def line_of(content: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(content).encode() + b"\n"  # ASCII: no character of a response ends the line


def fields_of(line: bytes, *keys: str) -> dict[str, Any]:
    """Read the fields of a message.

    Raises:
        ValueError: It is none, or lacks one of the keys.
    """
    content: Any = json.loads(line)
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise ValueError(f"{line[:80]!r}, which lacks one of {keys}")
    return cast(dict[str, Any], content)
