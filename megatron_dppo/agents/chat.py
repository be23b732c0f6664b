"""The wire format of `POST /v1/chat/completions`: reads requests, and writes replies, also as a stream."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

_OWN_CALL = re.compile(
    r"(?:call|toolu)_(\d+)_\d+"
)  # ids of tool calls that `Reply` makes: the node, and its n-th call
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TEXTS = ("text", "input_text", "output_text")  # types of a content's parts in all protocols
_NOT_THE_POLICY = "the sampled distribution would not be the policy's. Leave it out."

ChatMessage = dict[str, Any]
"""A message for the chat template: its content is text, and arguments of tool calls are JSON values."""


class RefusedError(Exception):
    """A call is refused with an HTTP status, and a sentence for the client."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def is_too_long(self) -> bool:
        """Whether a conversation is above a limit, so that a harness may shorten it."""
        return self.code == "context_length_exceeded"

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
    wants_usage: bool = True  # of a stream
    handles: frozenset[int] = frozenset()  # numbers of the nodes that ids and signatures name
    stops: tuple[str, ...] = ()  # strings that end the response

    @classmethod
    def of(
        cls,
        messages: Sequence[ChatMessage],
        tools: tuple[Mapping[str, Any], ...],
        max_tokens: int | None,
        *,
        may_call: bool,
        handles: frozenset[int] = frozenset(),
        stops: tuple[str, ...] = (),
        **options: bool,
    ) -> "Chat":
        """Return the chat with the nodes that ids of tool calls name, too.

        Raises:
            RefusedError: There is no message.
        """
        if not messages:
            raise RefusedError(400, "found no messages; expected at least one")
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        found = (_OWN_CALL.fullmatch(str(call.get("id"))) for call in calls)
        handles |= {int(match[1]) for match in found if match is not None}
        may_call, ordered = may_call and bool(tools), tuple(_in_order_of_calls(messages))
        return cls(ordered, tools, max_tokens, may_call, handles=handles, stops=stops, **options)


def _in_order_of_calls(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with the results of a response's tool calls in the order of the calls.

    Clients send them as the tools end, and most chat templates write only the results, without ids.
    """
    ordered: list[ChatMessage] = []
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        if not is_result:
            ordered += run
            continue
        calls = ordered[-1].get("tool_calls", ()) if ordered else ()
        places: dict[Any, int] = {call.get("id"): place for place, call in enumerate(calls)}
        ordered += sorted(run, key=lambda each: places.get(each.get("tool_call_id"), len(places)))
    return ordered


def read_chat(content: bytes) -> Chat:
    """Parse a request body.

    Raises:
        RefusedError: It is malformed, or asks for what a rollout cannot have.
    """
    with parsing(content) as body:
        messages = [_message(message) for message in body["messages"]]
        tools = tuple(cast("Sequence[Mapping[str, Any]]", body.get("tools") or ()))
        options = cast("Mapping[str, Any]", body.get("stream_options") or {})
        wants_usage = bool(options.get("include_usage"))
        require_form(messages, tools)
    choice, form = body.get("tool_choice"), body.get("response_format")
    faults = {
        "n": (body.get("n") or 1) != 1,
        "response_format": form is not None and form != {"type": "text"},
        "tool_choice": choice not in (None, "auto", "none", "required"),
    }
    refuse_sampling_options(body, faults, ("functions", "audio"))
    return Chat.of(
        messages,
        tools,
        largest(body, "max_tokens", "max_completion_tokens"),
        may_call=choice != "none",
        stops=stops_of(body, "stop"),
        is_stream=bool(body.get("stream")),
        wants_usage=wants_usage,
    )


@contextlib.contextmanager
def parsing(content: bytes) -> Iterator[Any]:
    """Yield a request's JSON; what is not there or of another type in the block is the client's fault.

    Raises:
        RefusedError: The body is malformed.
    """
    try:
        yield json.loads(content)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RefusedError(400, f"found a malformed body ({type(error).__name__}: {error})") from error


def require_form(messages: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
    """Require the types of a chat template's messages and tools.

    Raises:
        RefusedError: A text, a name or an id is no text, or a tool is no object.
    """
    for place, message in enumerate(messages):
        calls: Sequence[Any] = message.get("tool_calls", ())
        texts = {key: value for key, value in message.items() if key != "tool_calls"}
        texts |= {f"tool_calls[{n}].id": call["id"] for n, call in enumerate(calls) if call["id"] is not None}
        texts |= {f"tool_calls[{n}].name": call["function"]["name"] for n, call in enumerate(calls)}
        for key, value in texts.items():
            if not isinstance(value, str):
                found = json.dumps(value)[:80]
                raise RefusedError(400, f"messages[{place}].{key}: found {found}; expected text")
    for place, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RefusedError(400, f"tools[{place}]: found {json.dumps(tool)[:80]}; expected an object")


def largest(body: Mapping[str, Any], *keys: str) -> int | None:
    """Return the smallest limit of a response's tokens among these keys, or None.

    Raises:
        RefusedError: One is no positive integer.
    """
    limits = [body[key] for key in keys if body.get(key) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RefusedError(400, f"{keys[0]}: found {limits}; expected a positive integer")
    return min(limits, default=None)


def stops_of(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the strings that end a response.

    Raises:
        RefusedError: One is no string, or empty.
    """
    found = body.get(key) or []
    stops: list[Any] = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise RefusedError(400, f"{key}: found {found!r}; expected strings that are not empty")
    return tuple(stops)


def refuse_sampling_options(
    body: Mapping[str, Any], faults: Mapping[str, bool], unknown: Sequence[str] = ()
) -> None:
    """Refuse what would change the distribution of tokens, or what no reply has.

    `temperature`, `top_p` and `seed` are the run's, and a client's are ignored. A `tool_choice` that demands
    some tool counts as "auto".

    Args:
        body: The request.
        faults: Whether an option of this protocol is refused, by name.
        unknown: Options of this protocol that no reply has.

    Raises:
        RefusedError: It names the option.
    """
    biases = {name: bool(body.get(name)) for name in ("logit_bias", "frequency_penalty", "presence_penalty")}
    for name, is_there in {**faults, **biases}.items():
        if is_there:
            raise RefusedError(400, f"{name}: found {body[name]!r}; {_NOT_THE_POLICY}")
    for name in ("logprobs", "top_logprobs", "chat_template_kwargs", *unknown):
        if body.get(name):
            raise RefusedError(400, f"{name}: found {body[name]!r}; it is not supported. Leave it out.")


def _message(found: Any) -> ChatMessage:
    """Return a client's message for the chat template."""
    role = {"developer": "system"}.get(found["role"], found["role"])
    message: ChatMessage = {"role": role, "content": text_of(found.get("content"))}
    if found.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in found["tool_calls"]]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if found.get(key):
            message[key] = found[key]
    return message


def text_of(content: Any) -> str:
    """Return the text of a content, which may be a list of parts.

    Raises:
        RefusedError: A part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if any(part["type"] not in _TEXTS for part in content):
        raise RefusedError(400, f"content: found {[part['type'] for part in content]}; expected only text")
    return "".join(part["text"] for part in content)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call["function"]
    called = {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}
    return {"id": call.get("id"), "type": "function", "function": called}


def arguments_of(found: Any) -> Any:
    """Return a tool call's arguments as JSON values, or as the client has them if they do not parse."""
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            return json.loads(found)
    return found or {}


def arguments_text(function: Mapping[str, Any]) -> str:
    """Return a tool call's arguments as the JSON text that a client gets."""
    return json.dumps(function["arguments"], ensure_ascii=False)


def with_call_ids(message: ChatMessage, ids: Mapping[str, str]) -> ChatMessage:
    """Return a message with other ids of tool calls.

    Args:
        message: A client's message.
        ids: New ids by those that replies in the format of chats have.
    """
    if "tool_calls" not in message and "tool_call_id" not in message:
        return message
    calls = [call | {"id": _renamed(call.get("id"), ids)} for call in message.get("tool_calls", ())]
    result = {"tool_call_id": _renamed(message["tool_call_id"], ids)} if "tool_call_id" in message else {}
    return message | ({"tool_calls": calls} if calls else {}) | result


def _renamed(found: Any, ids: Mapping[str, str]) -> Any:
    return ids.get(str(found).replace("toolu_", "call_"), found)


def canonical(message: ChatMessage) -> str:
    """Return what clients keep of a message when they send it again: not ids, reasoning or outer spaces."""
    calls = [_with_whole_numbers(call["function"]) for call in message.get("tool_calls", ())]
    kept = [message["role"], message["content"].strip(), message.get("name") or "", calls]
    return json.dumps(kept, sort_keys=True)


def is_same(message: ChatMessage, other: ChatMessage) -> bool:
    """Return whether two messages are one object, or equal in canonical form without calls."""
    if message is other:
        return True
    if message.get("tool_calls") or other.get("tool_calls") or message["content"] != other["content"]:
        return False
    return (message["role"], message.get("name")) == (other["role"], other.get("name"))


def _with_whole_numbers(value: Any) -> Any:
    """Return a JSON value with 2.0 as 2: JavaScript's clients write it so."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(each) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in cast("list[Any]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Reply:
    """One response, as sent to a client."""

    message: ChatMessage  # for the chat template
    node: int  # its number in the episode
    episode: str  # id of the request that the episode answers
    created: int  # seconds since 1970
    finish_reason: str
    num_tokens: tuple[int, int]  # of the prompt and the response
    stop: str | None = None  # the client's stop string that ended it

    @property
    def name(self) -> str:
        """Name that no other reply has."""
        return f"{self.episode}-{self.node}"

    @property
    def model(self) -> str:
        """Name of the model."""
        return "policy"

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
        return {"id": f"chatcmpl-{self.name}", "object": kind, "created": self.created, "model": self.model}

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
    return {**call, "function": function | {"arguments": arguments_text(function)}}


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
