"""The wire format of `POST /v1/chat/completions`: reads requests, and writes replies, also as a stream."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

_OWN_CALL = re.compile(r"call_(\d+)_\d+")  # ids of tool calls that `Reply` makes: the node, and its n-th call
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NOT_THE_POLICY = "the sampled distribution would not be the policy's. Leave it out."

ChatMessage = dict[str, Any]
"""A message for the chat template: its content is text, and arguments of tool calls are JSON values."""


class RefusedError(Exception):
    """A call is refused with an HTTP status, and a sentence for the client."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {"error": {"message": str(self), "type": "invalid_request_error", "code": self.code}}


@dataclass(frozen=True)
class Chat:
    """One request for the next message of a chat."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    may_call: bool  # whether tool calls of the response are parsed
    is_stream: bool
    wants_usage: bool  # of a stream

    @property
    def own_nodes(self) -> set[int]:
        """Numbers of the nodes that the ids of tool calls in this chat name."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        found = (_OWN_CALL.fullmatch(str(call.get("id"))) for call in calls)
        return {int(match[1]) for match in found if match is not None}


def read_chat(content: bytes) -> Chat:
    """Parse a request body.

    Raises:
        RefusedError: It is malformed, or asks for what a rollout cannot have.
    """
    try:
        body: Any = json.loads(content)
        messages = tuple(_message(message) for message in body["messages"])
        tools = tuple(cast("Sequence[Mapping[str, Any]]", body.get("tools") or ()))
        limits = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(400, f"found a malformed body ({type(error).__name__}: {error})") from error
    if not messages:
        raise RefusedError(400, "messages: found none; expected at least one")
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RefusedError(400, f"max_tokens: found {limits}; expected a positive integer")
    _refuse_unsupported(body)
    options = cast("Mapping[str, Any]", body.get("stream_options") or {})
    return Chat(
        messages,
        tools,
        min(limits, default=None),
        may_call=bool(tools) and body.get("tool_choice") != "none",
        is_stream=bool(body.get("stream")),
        wants_usage=bool(options.get("include_usage")),
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Refuse what would change the distribution of tokens, or what no reply has.

    `temperature`, `top_p` and `seed` are the run's, and a client's are ignored. `tool_choice = "required"`
    counts as "auto".
    """
    choice, form = body.get("tool_choice"), body.get("response_format")
    faults = {
        "n": (body.get("n") or 1) != 1,
        "logit_bias": bool(body.get("logit_bias")),
        "frequency_penalty": bool(body.get("frequency_penalty")),
        "presence_penalty": bool(body.get("presence_penalty")),
        "stop": bool(body.get("stop")),
        "response_format": form is not None and form != {"type": "text"},
        "tool_choice": choice not in (None, "auto", "none", "required"),
    }
    for name, is_there in faults.items():
        if is_there:
            raise RefusedError(400, f"{name}: found {body[name]!r}; {_NOT_THE_POLICY}")
    for name in ("logprobs", "functions", "audio", "chat_template_kwargs"):
        if body.get(name):
            raise RefusedError(400, f"{name}: found {body[name]!r}; it is not supported. Leave it out.")


def _message(found: Any) -> ChatMessage:
    """Return a client's message for the chat template."""
    role = {"developer": "system"}.get(found["role"], found["role"])
    message: ChatMessage = {"role": role, "content": _text(found.get("content"))}
    if found.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in found["tool_calls"]]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if found.get(key):
            message[key] = found[key]
    return message


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] != "text" for part in content):
        raise RefusedError(400, f"content: found {[part['type'] for part in content]}; expected only text")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any) -> dict[str, Any]:
    function, arguments = call["function"], call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # it stays as the client has it
            arguments = json.loads(arguments)
    called = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": called}


def canonical(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return what clients keep of messages when they send them again: not ids, reasoning or outer spaces."""
    return tuple(_canonical(message) for message in messages)


def _canonical(message: ChatMessage) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    kept = [message["role"], message["content"].strip(), message.get("name") or "", calls]
    return json.dumps(kept, sort_keys=True)


@dataclass(frozen=True)
class Reply:
    """One response, as sent to a client."""

    message: ChatMessage  # for the chat template
    id: str
    model: str
    created: int
    finish_reason: str
    num_tokens: tuple[int, int]  # of the prompt and the response

    def json(self) -> bytes:
        """Return the body of a reply that is no stream."""
        choice = {"index": 0, "message": self._sent, "logprobs": None, "finish_reason": self.finish_reason}
        return json.dumps(self._head("chat.completion") | {"choices": [choice], "usage": self._usage}).encode()

    def stream(self, *, has_usage: bool) -> bytes:
        """Return the reply as server-sent events: the complete message, then its end."""
        return b"".join(b"data: " + event.encode() + b"\n\n" for event in self._events(has_usage))

    def _events(self, has_usage: bool) -> Iterator[str]:
        delta = {key: value for key, value in self._sent.items() if value is not None}
        calls = [{"index": n, **call} for n, call in enumerate(delta.pop("tool_calls", []))]
        delta |= {"tool_calls": calls} if calls else {}
        for part, reason in ((delta, None), ({}, self.finish_reason)):
            choice: dict[str, Any] = {"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}
            yield json.dumps(self._head("chat.completion.chunk") | {"choices": [choice]})
        if has_usage:
            yield json.dumps(self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage})
        yield "[DONE]"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, response = self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response}

    @property
    def _sent(self) -> dict[str, Any]:
        """The message as a client reads it: arguments are JSON text, and content is null next to tool calls."""
        message = dict(self.message)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [_as_sent(call) for call in calls]
        return message


def _as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def parse_response(text: str, node: int, *, may_call: bool) -> ChatMessage:
    """Split the text of a response into reasoning, content and tool calls.

    Reasoning ends with `</think>`. Tool calls are JSON objects between `<tool_call>` and `</tool_call>`, with
    `name` and `arguments`. If one of them does not parse, all of it stays content.
    """
    reasoning, mark, content = text.partition("</think>")
    message: ChatMessage = {"role": "assistant", "content": content.strip() if mark else text}
    if mark:
        message["reasoning_content"] = reasoning.strip().removeprefix("<think>").strip()
    if may_call and (found := _TOOL_CALL.findall(message["content"])):
        try:
            functions = [_function(json.loads(each)) for each in found]
        except (ValueError, KeyError, TypeError):
            return message
        message["content"] = message["content"].partition("<tool_call>")[0].strip()
        message["tool_calls"] = [
            {"id": f"call_{node}_{n}", "type": "function", "function": each} for n, each in enumerate(functions)
        ]
    return message


def _function(found: Any) -> dict[str, Any]:
    if not isinstance(found["name"], str):
        raise TypeError("expected a name")
    return {"name": found["name"], "arguments": found.get("arguments") or {}}
