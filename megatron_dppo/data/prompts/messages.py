"""Reads the prompt of a row: text or messages, tools, and arguments of the chat template."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron_dppo.data.prompts.rows import describe_cell, fault
from megatron_dppo.errors import DataError
from megatron_dppo.types import Message

Asked = str | tuple[Message, ...]
"""A prompt: text, or the messages of a chat."""
Fields = Mapping[str, Any]

TOOLS, TEMPLATE_ARGUMENTS = "tools", "chat_template_kwargs"
"""Columns that the chat template receives in addition to the messages."""
READ_COLUMNS = frozenset((TOOLS, TEMPLATE_ARGUMENTS))
_MEDIA = frozenset(
    ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data", "multi_modal_inputs")
)
_UNREAD = {
    "system": "Write it as the first message, of role 'system'.",
    "system_prompt": "Write it as the first message, of role 'system'.",
    "functions": f"Rename the column to {TOOLS!r}.",
    "tool_calls": "Write them into the assistant's message.",
    "documents": f"Write them into a message, or into {TEMPLATE_ARGUMENTS!r} if the chat template takes them.",
}
"""Unread columns that would change the prompt, with the advice to the user."""
_OURS = frozenset(
    ("tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "messages", TOOLS)
)
_LIKE_MESSAGES = re.compile(
    r"""\s*\[?\s*\{\s*\\?['"](?:role|content|from|value|messages|conversations)\\?['"]\s*:"""
)


@dataclass(frozen=True)
class PromptCell:
    """The prompt of one row, with the fields of `Prompt`."""

    asked: Asked
    tools: tuple[Fields, ...] | None = None
    template_arguments: Fields | None = None


def prompt_cell(where: str, row: Fields, value: object, named: Collection[str], key: str) -> PromptCell:
    """Return the prompt of a row.

    A null field of a message, a tool or an argument counts as absent, because Parquet does not distinguish the
    two. Text that is JSON of messages is read as these messages.

    Args:
        where: File and row, for error messages.
        row: All columns of the row.
        value: Cell of the prompt column.
        named: Columns of the prompt and the answer.
        key: Setting that names the prompt column.
    """
    _refuse_other_columns(where, row, named)
    asked = _read_prompt(where, value, key)
    columns = [name for name in (TOOLS, TEMPLATE_ARGUMENTS) if name not in named]
    given = {name: row[name] for name in columns if not _is_empty(row.get(name))}
    if given and isinstance(asked, str):
        found = f"{' and '.join(given)} with a text prompt"
        action = "Make the prompt a list of messages, or leave the column out."
        raise fault(where, found, "messages, which the chat template writes with them", action)
    return PromptCell(
        asked,
        _tools(where, given[TOOLS]) if TOOLS in given else None,
        _arguments(where, given[TEMPLATE_ARGUMENTS]) if TEMPLATE_ARGUMENTS in given else None,
    )


def _read_prompt(where: str, value: object, key: str) -> Asked:
    if isinstance(value, str):
        parsed = _objects(_parsed(value))
        if parsed and all("role" in item for item in parsed):
            value = parsed
        elif _LIKE_MESSAGES.match(value):
            action = "Store the column as a list of messages."
            raise fault(
                where, f"{describe_cell(value)} as the prompt", "JSON of a list of messages, or text", action
            )
        elif value:
            return value
    if not isinstance(value, list) or not value:
        raise _bad_prompt(where, describe_cell(value), key)
    messages = tuple(_message(where, item, key) for item in cast(list[object], value))
    if messages[-1]["role"] == "assistant":
        expected = "a last message that the policy responds to, of the user or of a tool"
        action = "Remove it, since it may contain the answer. Only a text prompt can begin the response."
        raise fault(where, "a last message of the assistant", expected, action)
    return messages


def _message(where: str, item: object, key: str) -> Message:
    """Return a message with text content and all its other fields."""
    given = _object(item) or {}
    media = sorted(name for name in _MEDIA & given.keys() if not _is_empty(given[name]))
    if media:
        raise _not_text(where, f"a message with {', '.join(media)}")
    content = _content(where, given.get("content"))
    fields = _without_nulls(where, {**given, "content": content})
    calls = fields.pop("tool_calls", None)
    role = fields.get("role")
    if content is None and not _is_empty(calls):
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise _bad_prompt(where, f"message {describe_cell(item)}", key)
    fields |= (
        {"content": content} if _is_empty(calls) else {"content": content, "tool_calls": _calls(where, calls)}
    )
    return cast(Message, fields)


def _content(where: str, content: object) -> object:
    """Return the content of a message, with text parts joined."""
    parts = _objects(content)
    if parts is None:
        return content
    kinds = {str(part.get("type")) for part in parts} - {"text"}
    if kinds:
        raise _not_text(where, f"a message with a part of type {', '.join(sorted(kinds))}")
    return "".join(str(part.get("text", "")) for part in parts)


def _calls(where: str, value: object) -> list[Fields]:
    """Return the tool calls of a message, with arguments as objects, since templates write them as JSON."""
    calls, given = list[Fields](), _objects(_parsed(value))
    for call in [{}] if given is None else given:
        function = _object(call.get("function", call)) or {}
        if not isinstance(function.get("name"), str):
            expected = "a list of calls, each with a function's 'name' and 'arguments'"
            raise fault(where, f"{describe_cell(value)} as tool_calls", expected, "Correct the message.")
        text = function.get("arguments", {})
        arguments = _object(_parsed(text))
        if arguments is None:
            found = f"{describe_cell(text)} as arguments of a tool call"
            raise fault(where, found, "an object, or its JSON", "Correct the message.")
        function = function | {"arguments": arguments}
        calls.append(call | {"function": function} if "function" in call else function)
    return calls


def _tools(where: str, value: object) -> tuple[Fields, ...]:
    parsed = _parsed(value)
    if isinstance(parsed, list):
        parsed = [_parsed(item) for item in cast(list[object], parsed)]
    tools = _objects(parsed)
    if tools is None:
        expected = "a list of JSON schemas of functions, or its JSON"
        raise fault(
            where, f"{describe_cell(value)} as {TOOLS}", expected, "Correct the column, or leave it out."
        )
    return tuple(_without_nulls(where, tool) for tool in tools)


def _arguments(where: str, value: object) -> Fields:
    parsed = _object(_parsed(value))
    if parsed is None:
        expected = "an object of arguments by name, or its JSON"
        action = "Correct the column, or leave it out."
        raise fault(where, f"{describe_cell(value)} as {TEMPLATE_ARGUMENTS}", expected, action)
    arguments = _without_nulls(where, parsed)
    ours = sorted(_OURS & arguments.keys())
    if ours:
        expected = "only arguments of the chat template: the run sets this one"
        raise fault(where, f"{', '.join(ours)} in {TEMPLATE_ARGUMENTS}", expected, "Leave it out.")
    return arguments


def _refuse_other_columns(where: str, row: Fields, named: Collection[str]) -> None:
    present = [name for name, value in row.items() if name not in named and not _is_empty(value)]
    media = sorted(_MEDIA.intersection(present))
    if media:
        raise _not_text(where, f"a column {', '.join(media)}")
    for name in present:
        if name in _UNREAD:
            expected = "everything that the model reads in the prompt column"
            raise fault(where, f"a column {name!r}, which is not read", expected, _UNREAD[name])


def _not_text(where: str, found: str) -> DataError:
    action = "Leave such rows out: multimodal training is not supported."
    return fault(where, found, "only text", action)


def _bad_prompt(where: str, found: str, key: str) -> DataError:
    expected = "a non-empty string, or a non-empty list of messages with text 'role' and 'content'"
    action = f"Correct the row, or name another {key}."
    return fault(where, f"{found} as the prompt", expected, action)


def _parsed(value: object) -> Any:
    """Return the list or object that a JSON text contains, `None` for any other text, or else the value."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(value)
    except ValueError:
        return None


def _object(value: object) -> dict[str, Any] | None:
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _objects(value: object) -> list[dict[str, Any]] | None:
    """Return the value if it is a list of objects, else `None`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast(list[object], value)):
        return None
    return cast(list[dict[str, Any]], value)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict | tuple) and not value)


def _without_nulls(where: str, value: object) -> dict[str, Any]:
    """Return an object without its null fields, at any depth."""

    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            items = cast(dict[Any, Any], value).items()
            return {str(name): pruned(inner) for name, inner in items if inner is not None}
        if isinstance(value, list | tuple):
            return [pruned(inner) for inner in cast(list[Any], value)]
        if isinstance(value, str | int | float | bool) or value is None:
            return value
        raise fault(
            where, describe_cell(value), "text, numbers, lists and objects", "Convert the field to text."
        )

    return pruned(value)
