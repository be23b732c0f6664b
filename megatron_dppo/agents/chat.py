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
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("text", "input_text", "output_text")  # types of a content's parts in all protocols
_OPTIONS = frozenset(
    {
        *("messages", "max_tokens", "max_completion_tokens", "n", "stop", "stream_options"),
        *("response_format", "reasoning_effort", "verbosity", "prediction", "usage"),
    }
)
_OF_ALL = frozenset(
    {  # what is read, or what the run decides or nothing depends on
        *("model", "tools", "tool_choice", "parallel_tool_calls", "stream", "temperature", "top_p"),
        *("top_k", "min_p", "seed", "user", "metadata", "store", "service_tier", "reasoning"),
        *("thinking", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
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
        """Return the chat with the nodes that ids of tool calls name, too."""
        if not messages:
            raise RefusedError(400, "found no messages; expected at least one")
        if messages[-1]["role"] == "assistant":
            found = "messages: found one of the assistant at the end; expected one of the user or a tool"
            raise RefusedError(
                400, f"{found}. The policy samples whole responses, and continues no text of others."
            )
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
    """Parse a request body."""
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
    refuse_sampling_options(body, faults, _OPTIONS)
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
    """Yield a request's JSON; what is not there or of another type in the block is the client's fault."""
    try:
        yield json.loads(content, parse_constant=_refuse_constant)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RefusedError(400, f"found a malformed body ({type(error).__name__}: {error})") from error


def _refuse_constant(name: str) -> Any:
    """Refuse what Python reads and JSON does not have."""
    raise ValueError(f"found {name}, which is no JSON")


def require_form(messages: Sequence[ChatMessage], tools: Sequence[Any]) -> None:
    """Require the types of a chat template's messages and tools."""
    for place, message in enumerate(messages):
        if message["role"] not in _ROLES:
            raise RefusedError(
                400, f"messages[{place}].role: found {message['role']!r}; expected one of {', '.join(_ROLES)}"
            )
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
    """Return the smallest limit of a response's tokens among these keys, or None."""
    limits = [body[key] for key in keys if body.get(key) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RefusedError(400, f"{keys[0]}: found {limits}; expected a positive integer")
    return min(limits, default=None)


def stops_of(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the strings that end a response."""
    found = body.get(key) or []
    stops: list[Any] = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise RefusedError(400, f"{key}: found {found!r}; expected strings that are not empty")
    return tuple(stops)


def refuse_sampling_options(body: Mapping[str, Any], faults: Mapping[str, bool], known: frozenset[str]) -> None:
    """Refuse what would change the distribution of tokens, and what is not known.

    `temperature`, `top_p`, `top_k`, `min_p` and `seed` are the run's, and a client's are ignored. A
    `tool_choice` that demands some tool counts as "auto". An option that is null, false or empty is not set.

    Args:
        body: The request.
        faults: Whether an option of this protocol is refused, by name.
        known: Options of this protocol alone.
    """
    for name, is_there in faults.items():
        if is_there:
            raise RefusedError(400, f"{name}: found {body[name]!r}; {_NOT_THE_POLICY}")
    for name in body.keys() - _OF_ALL - known - faults.keys():
        if body[name]:
            raise RefusedError(400, f"{name}: found {str(body[name])[:80]}; it is not supported. Leave it out.")


def _message(found: Any) -> ChatMessage:
    """Return a client's message for the chat template."""
    role = {"developer": "system"}.get(found["role"], found["role"])
    message: ChatMessage = {"role": role, "content": text_of(found.get("content"))}
    if found.get("function_call"):
        raise RefusedError(
            400, "messages: found function_call; expected tool_calls, and results of the role tool"
        )
    if found.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in found["tool_calls"]]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if found.get(key):
            message[key] = found[key]
    return message


def text_of(content: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
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
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(found, parse_constant=_refuse_constant)
    return found or {}


def arguments_text(function: Mapping[str, Any]) -> str:
    """Return a tool call's arguments as the JSON text that a client gets."""
    return json.dumps(function["arguments"], ensure_ascii=False)


@dataclass(frozen=True)
class Reply:
    """One response, as sent to a client."""

    message: ChatMessage  # for the chat template
    node: int  # its number in the episode
    episode: str  # id of the request that the episode belongs to
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


def parse_response(text: str, node: int, *, may_call: bool, is_thinking: bool = False) -> ChatMessage:
    """Split the text of a response into reasoning, content and tool calls.

    Reasoning ends with `</think>`. Tool calls are JSON objects between `<tool_call>` and `</tool_call>`, with
    `name` and `arguments`. If one of them does not parse, or its arguments are no object, all of it stays
    content. So do calls in a thought that has not ended.

    Args:
        text: Text of the response.
        node: Number of the node, for the ids of tool calls.
        may_call: Whether tool calls are read.
        is_thinking: Whether the prompt opened a thought.
    """
    reasoning, mark, content = text.partition("</think>")
    message: ChatMessage = {"role": "assistant", "content": content.strip() if mark else text}
    if mark:
        message["reasoning_content"] = reasoning.strip().removeprefix("<think>").strip()
    is_open = not mark and (is_thinking or "<think>" in text)
    if may_call and not is_open and (found := _TOOL_CALL.findall(message["content"])):
        try:
            functions = [_function(json.loads(each, parse_constant=_refuse_constant)) for each in found]
        except (ValueError, KeyError, TypeError, RecursionError):
            return message
        message["content"] = message["content"].partition("<tool_call>")[0].strip()
        message["tool_calls"] = [
            {"id": f"call_{node}_{n}", "type": "function", "function": each} for n, each in enumerate(functions)
        ]
    return message


def _function(found: Any) -> dict[str, Any]:
    """Return a call with arguments that are an object; some models write it as text, or call it parameters."""
    if not isinstance(found, Mapping):
        raise TypeError("expected an object")
    call = cast("Mapping[str, Any]", found)
    arguments = arguments_of(call.get("arguments", call.get("parameters")) or {})
    if not isinstance(call["name"], str) or not isinstance(arguments, Mapping):
        raise TypeError("expected a name, and arguments that are an object")
    return {"name": call["name"], "arguments": arguments}
