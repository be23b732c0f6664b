"""Checks that a chat template writes every part of a prompt, and finds the tokens that end a turn."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from megatron_dppo.data.prompts.rows import fault
from megatron_dppo.data.prompts.templates import prompt_tokens, written
from megatron_dppo.types import Message, Prompt

_MARK = "the-response-stands-here"


def whole_tokens(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """Return the token ids of a prompt as in a rollout, after a check that no part of the prompt is missing.

    Raises:
        DataError: The tokenizer cannot encode the prompt, or its chat template omits a part.
    """
    options = (prompt.tools, prompt.template_arguments)
    tokens = prompt_tokens(tokenizer, prompt.text, prompt.messages, *options)
    require_whole(tokenizer, prompt)
    return tokens


def require_whole(tokenizer: Any, prompt: Prompt) -> None:
    """Check that the chat template writes every message, tool and tool call, and reads every argument.

    The template may omit an assistant's thoughts, and its text in a message with tool calls. Many templates do.

    Raises:
        DataError: The template omits a message, tool, tool call or argument.
    """
    if prompt.messages is None:
        return
    text = cast(str, written(tokenizer, prompt.messages, prompt.tools, prompt.template_arguments))
    missing = [
        *_missing_of_messages(text, prompt.messages),
        *_missing_tools(tokenizer, text, prompt),
        *_unread_arguments(tokenizer, prompt),
    ]
    if missing:
        where = f"the chat template in {tokenizer.name_or_path}"
        action = "Correct or remove the row, or use the chat template that the row was made for."
        raise fault(where, "; ".join(missing), "one that writes all of the prompt", action)


def _missing_of_messages(text: str, messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        calls = cast(Mapping[str, Any], message).get("tool_calls", ())
        content = message["content"].strip()
        if message["role"] == "assistant":
            content = "" if calls else content.rpartition("</think>")[2].strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]
        if content not in text and as_json not in text:
            yield f"no message of {message['role']!r}"
        names = [cast(str, call.get("function", call)["name"]) for call in calls]
        yield from (f"no call of {name!r}" for name in names if name not in text)


def _missing_tools(tokenizer: Any, text: str, prompt: Prompt) -> Iterator[str]:
    if prompt.tools is None:
        return
    names = [str(tool.get("function", tool).get("name", "")) for tool in prompt.tools]
    assert prompt.messages is not None, "tools come with messages"
    without = cast(str, written(tokenizer, prompt.messages, None, prompt.template_arguments))
    if text == without:
        yield "no tools"
    else:
        yield from (f"no tool {name!r}" for name in names if name not in text)


def _unread_arguments(tokenizer: Any, prompt: Prompt) -> Iterator[str]:
    if not prompt.template_arguments:
        return
    source = str(tokenizer.get_chat_template(tools=list(prompt.tools) if prompt.tools else None))
    for name in prompt.template_arguments:
        if re.search(rf"\b{re.escape(name)}\b", source) is None:
            yield f"nothing that reads {name!r} of chat_template_kwargs"


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the first added token after an assistant message, in the middle and at the end of a chat.

    Raises:
        DataError: The chat template rejects a chat of two turns.
    """
    question, response = Message(role="user", content="?"), Message(role="assistant", content=_MARK)
    chats = ([question, response, question], [question, response])
    texts = [cast(str, written(tokenizer, chat, add_generation_prompt=False)) for chat in chats]
    rests = [text.partition(_MARK)[2] for text in texts]
    added = set(cast(Mapping[int, Any], tokenizer.added_tokens_decoder))
    ids = [cast(list[int], tokenizer.encode(rest, add_special_tokens=False)) for rest in rests]
    firsts = [next((token for token in each if token in added), None) for each in ids]
    return list(dict.fromkeys(token for token in firsts if token is not None))
