"""The wire format of Anthropic's `POST /v1/messages`: reads requests, and writes replies, also as a stream."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.agents.chat import (
    Chat,
    ChatMessage,
    RefusedError,
    Reply,
    largest,
    parsing,
    refuse_sampling_options,
    require_form,
    stops_of,
    text_of,
)

_SIGNATURE = re.compile(r"policy_(\d+)")  # of the thinking that `_blocks` sends: the node
_OPTIONS = frozenset(
    {
        *("messages", "system", "max_tokens", "stop_sequences", "context_management", "cache_control"),
        *("speed", "inference_geo"),
    }
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TYPES = {401: "authentication_error", 503: "overloaded_error", 500: "api_error"}


def read_messages(content: bytes) -> Chat:
    """Parse a request body."""
    with parsing(content) as body:
        system = [{"role": "system", "content": text_of(body["system"])}] if body.get("system") else []
        messages = [each for message in body["messages"] for each in _from_client(message)]
        blocks = [block for message in body["messages"] for block in _blocks_of(message)]
        signatures = (_SIGNATURE.fullmatch(str(block.get("signature"))) for block in blocks)
        tools = tuple(_tool(tool) for tool in body.get("tools") or ())
        choice = (body.get("tool_choice") or {}).get("type")
        has_form = bool((body.get("output_config") or {}).get("format"))
        require_form(system + messages, tools)
    faults = {
        "tool_choice": choice == "tool",
        "output_config": has_form,
        "output_format": bool(body.get("output_format")),
    }
    refuse_sampling_options(body, faults, _OPTIONS)
    return Chat.of(
        [*system, *messages],
        tools,
        largest(body, "max_tokens"),
        may_call=choice != "none",
        stops=stops_of(body, "stop_sequences"),
        is_stream=bool(body.get("stream")),
        handles=frozenset(int(match[1]) for match in signatures if match is not None),
    )


def _blocks_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _from_client(message: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield a message as the chat template has it: one for each tool result, and one for the rest."""
    rest: list[Mapping[str, Any]] = []
    for block in _blocks_of(message):
        if block["type"] == "tool_result":
            text = text_of(block.get("content"))
            result = {"role": "tool", "content": text or "Error" * bool(block.get("is_error"))}
            yield result | {"tool_call_id": block["tool_use_id"]}
        elif block["type"] in ("text", "tool_use", "thinking", "redacted_thinking"):
            rest.append(block)
        else:
            raise RefusedError(400, f"content: found {block['type']!r}; expected only text and tools")
    calls = [_called(block) for block in rest if block["type"] == "tool_use"]
    thinking = [block["thinking"] for block in rest if block["type"] == "thinking"]
    text = "".join(block["text"] for block in rest if block["type"] == "text")
    if rest:
        own: ChatMessage = {"role": message["role"], "content": text}
        own |= {"tool_calls": calls} if calls else {}
        yield own | ({"reasoning_content": "".join(thinking)} if thinking else {})


def _called(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": block.get("input") or {}}
    return {"id": block["id"], "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise RefusedError(400, f"tools: found {tool.get('type')!r}; expected tools with an input_schema")
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def body_of(reply: Reply, chat: Chat) -> bytes:
    """Return the body of a reply that is no stream."""
    return json.dumps(_head(reply) | _end(reply) | {"content": _blocks(reply), "usage": _usage(reply)}).encode()


def events_of(reply: Reply, chat: Chat) -> bytes:
    """Return the reply as server-sent events: each block complete, then the end."""
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in _events(reply)
    )


def error_of(error: RefusedError) -> dict[str, Any]:
    """Return Anthropic's error body."""
    message = f"prompt is too long: {error}" if error.is_too_long else str(error)
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _events(reply: Reply) -> Iterator[dict[str, Any]]:
    usage, open_end = _usage(reply), {"stop_reason": None, "stop_sequence": None}
    start = _head(reply) | open_end | {"content": [], "usage": usage | {"output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(_blocks(reply)):
        begun, deltas = _in_parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": begun}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _end(reply), "usage": usage}
    yield {"type": "message_stop"}


def _in_parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an empty block, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            deltas = [("thinking_delta", "thinking", block["thinking"])]
            deltas += [("signature_delta", "signature", block["signature"])]
            empty = {"thinking": "", "signature": ""}
        case "tool_use":
            deltas = [("input_json_delta", "partial_json", json.dumps(block["input"], ensure_ascii=False))]
            empty = {"input": {}}
        case _:
            deltas, empty = [("text_delta", "text", block["text"])], {"text": ""}
    return {**block, **empty}, [{"type": kind, key: value} for kind, key, value in deltas]


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": f"policy_{reply.node}"})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function, name = call["function"], str(call["id"]).replace("call_", "toolu_")
        blocks.append(
            {"type": "tool_use", "id": name, "name": function["name"], "input": function["arguments"]}
        )
    return blocks


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.name}", "type": "message", "role": "assistant", "model": reply.model}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.stop is not None and reply.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, response = reply.num_tokens
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": response, **cached}
