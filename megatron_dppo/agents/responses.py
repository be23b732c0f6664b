"""The wire format of OpenAI's `POST /v1/responses`: reads requests, and writes replies, also as a stream.

Stateless: a request has all items of the conversation, and no `previous_response_id`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.agents.chat import (
    Chat,
    ChatMessage,
    RefusedError,
    Reply,
    arguments_of,
    arguments_text,
    largest,
    parsing,
    refuse_sampling_options,
    require_form,
    text_of,
)

_OPTIONS = frozenset(
    {
        *("input", "instructions", "max_output_tokens", "max_tool_calls", "include", "stream_options"),
        *("truncation", "client_metadata"),
    }
)
_OWN_ITEM = re.compile(r"(?:rs|msg|fc)_(\d+)(?:_\d+)?")  # ids of the items that `_items` sends: the node


def read_responses(content: bytes) -> Chat:
    """Parse a request body."""
    with parsing(content) as body:
        found: Any = body["input"]
        items = [{"role": "user", "content": found}] if isinstance(found, str) else list(found)
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        messages = _joined(items)
        tools = tuple(_tool(tool) for tool in body.get("tools") or () if tool["type"] == "function")
        own = (_OWN_ITEM.fullmatch(str(item.get("id"))) for item in items)
        form, choice = (body.get("text") or {}).get("format"), body.get("tool_choice")
        require_form(system + messages, tools)
    faults = {
        "text": form is not None and form != {"type": "text"},
        "tool_choice": choice not in (None, "auto", "none", "required"),
    }
    refuse_sampling_options(body, faults, _OPTIONS)
    return Chat.of(
        [*system, *messages],
        tools,
        largest(body, "max_output_tokens"),
        may_call=choice != "none",
        is_stream=bool(body.get("stream")),
        handles=frozenset(int(match[1]) for match in own if match is not None),
    )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _joined(items: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the items as messages for the chat template; the items of one response are one message."""
    messages: list[ChatMessage] = []
    is_open = False  # whether the last message may get more items of the response
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            output = {"role": "tool", "content": text_of(item["output"])}
            messages.append(output | {"tool_call_id": item["call_id"]})
            is_open = False
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": text_of(item["content"])})
            is_open = False
        elif kind in ("message", "reasoning", "function_call"):
            if not is_open or (kind == "message" and messages[-1]["content"]):
                messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], kind, item)
            is_open = True
        else:
            raise RefusedError(400, f"input: found {kind!r}; expected messages, functions and reasoning")
    return messages


def _extend(message: ChatMessage, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        message["content"] = text_of(item["content"])
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": arguments_of(item.get("arguments"))}
        calls = message.setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})
    elif item.get("content"):
        message["reasoning_content"] = "".join(part["text"] for part in item["content"])


def body_of(reply: Reply, chat: Chat) -> bytes:
    """Return the body of a reply that is no stream."""
    return json.dumps(_whole(reply, chat)).encode()


def events_of(reply: Reply, chat: Chat) -> bytes:
    """Return the reply as server-sent events: each item complete, then the response."""
    events = enumerate(_events(reply, chat))
    numbered = ({**event, "sequence_number": number} for number, event in events)
    return b"".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode() for each in numbered)


def _events(reply: Reply, chat: Chat) -> Iterator[dict[str, Any]]:
    whole = _whole(reply, chat)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if "content" in item else {"arguments": ""} if "arguments" in item else {}
        added = item | empty | ({"status": "in_progress"} if "status" in item else {})
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        for event in _parts(item):
            yield event | place
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _parts(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        kind, name = "response.function_call_arguments", {"name": item["name"]}
        yield {"type": f"{kind}.delta", "delta": item["arguments"]}
        yield {"type": f"{kind}.done", "arguments": item["arguments"], **name}
        return
    for index, part in enumerate(item["content"]):
        kind = f"response.{part['type']}"
        place: dict[str, Any] = {"content_index": index}
        more = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **place}
        yield {"type": f"{kind}.delta", "delta": part["text"], **place, **more}
        yield {"type": f"{kind}.done", "text": part["text"], **place, **more}
        yield {"type": "response.content_part.done", "part": part, **place}


def _whole(reply: Reply, chat: Chat) -> dict[str, Any]:
    prompt, response = reply.num_tokens
    is_cut = reply.finish_reason == "length"
    return {
        "id": f"resp_{reply.name}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "output": list(_items(reply)),
        "parallel_tool_calls": True,
        "store": False,
        "temperature": None,
        "tool_choice": "auto" if chat.may_call else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in chat.tools],
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": response,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + response,
        },
    }


def _items(reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the output items; their ids name the node."""
    message, node = reply.message, reply.node
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if thinking := message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": thinking}]
        yield {"type": "reasoning", "id": f"rs_{node}", "summary": [], "content": parts}
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        parts = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        yield {"type": "message", "id": f"msg_{node}", "role": "assistant", "status": status, "content": parts}
    for number, call in enumerate(calls):
        function = call["function"]
        named = {"call_id": call["id"], "name": function["name"], "arguments": arguments_text(function)}
        yield {"type": "function_call", "id": f"fc_{node}_{number}", "status": status, **named}
