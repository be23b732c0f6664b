"""Turns chats into token ids: openings by the chat template, and what follows a response by its difference."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_dppo.agents.chat import ChatMessage, parse_response
from megatron_dppo.data.prompts.templates import apply_chat_template, prompt_tokens, require_chat_template
from megatron_dppo.errors import DataError

Thinking = Literal["keep", "template"]
_MARK = "the-response-stands-here"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class Rendering:
    """Renders chats with a tokenizer. Sampled tokens are never encoded again."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        """Store the tokenizer.

        Args:
            tokenizer: Tokenizer of the model.
            thinking: "keep" continues a sequence although the template would now leave out its earlier
                thinking; "template" does not.

        Raises:
            DataError: The tokenizer has no chat template.
        """
        require_chat_template(tokenizer)
        self._tokenizer, self._thinking = tokenizer, thinking
        self._has_system_anywhere = _writes_system_anywhere(tokenizer)

    def opening(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the token ids of a complete chat, up to the beginning of the response.

        Raises:
            DataError: The chat template refuses the chat.
        """
        return prompt_tokens(self._tokenizer, None, cast(Any, self.placed(messages)), tools, arguments)

    def continuation(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        path: Sequence[ChatMessage],
        added: str,
        new: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> Tensor | None:
        """Return the token ids `[N]` int64 of new messages after a response, up to the next response.

        The end-of-turn token of the response comes first if the response lacks it.

        Args:
            prompt: Token ids before the response.
            response: Token ids of the response.
            path: Messages before the response.
            added: Text that the client added to the response.
            new: Messages after it.
            tools: Tools of the chat.
            arguments: Arguments of the chat template.

        Returns:
            None if the template does not append: the new messages change how it writes the earlier ones.
        """
        answered = [*path, {"role": "assistant", "content": f"{_MARK}{added}"}]
        try:
            before = self._write(answered, tools, arguments, asks=False)
            after = self._write([*answered, *new], tools, arguments, asks=True)
        except DataError:
            return None
        (head, *ends), (new_head, *rests) = before.split(_MARK), after.split(_MARK)
        if len(ends) != 1 or len(rests) != 1 or self._kept(head) != self._kept(new_head):
            return None
        ids = cast("list[int]", self._tokenizer.encode(rests[0], add_special_tokens=False))
        if ids and [ids[0]] == list(response[-1:]):
            ids = ids[1:]
        return torch.tensor(ids, dtype=torch.int64)

    def appends(self) -> bool:
        """Return whether a message of a user, and a tool's result, can follow a response."""
        asked, said = {"role": "user", "content": "2 + 3?"}, {"role": "tool", "content": "5"}
        prompt, response = self.opening([asked], (), {}), self._tokenizer.encode("5", add_special_tokens=False)
        added = (self.continuation(prompt, response, [asked], "", [new], (), {}) for new in (asked, said))
        return all(each is not None for each in added)

    def read(
        self,
        ids: Sequence[int],
        prompt: Sequence[int],
        number: int,
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        may_call: bool,
    ) -> ChatMessage:
        """Return the message of a response, as `parse_response` reads its text.

        Args:
            ids: Token ids of the response.
            prompt: Token ids before it.
            number: Number of the node, for the ids of tool calls.
            tools: Tools of the chat.
            arguments: Arguments of the chat template.
            may_call: Whether tool calls are read.
        """
        return parse_response(self.text(ids), number, may_call=may_call)

    def placed(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return messages of which only the first may be a system message, unless the template writes all."""
        if self._has_system_anywhere:
            return list(messages)
        first = list(takewhile(lambda message: message["role"] == "system", messages))
        rest = [
            each | {"role": "user"} if each["role"] == "system" else each for each in messages[len(first) :]
        ]
        joined = (
            [{"role": "system", "content": "\n\n".join(each["content"] for each in first)}] if first else []
        )
        return [*joined, *rest]

    def text(self, ids: Sequence[int]) -> str:
        """Decode a response without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def ended(self, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str, str | None]:
        """Return the number of tokens of a response up to its end, its text, and the stop string that ends it.

        A response ends with the token that completes the first stop string. Its text ends before the string.
        """

        def found(number: int) -> list[tuple[int, str]]:
            text = self.text(ids[:number])
            return [(text.index(stop), stop) for stop in stops if stop in text]

        if not stops or not found(len(ids)):
            return len(ids), self.text(ids), None
        number = bisect_left(range(len(ids)), True, key=lambda number: bool(found(number)))
        place, stop = min(found(number))
        return number, self.text(ids[:number])[:place], stop

    def _kept(self, text: str) -> str:
        return _THOUGHT.sub("", text) if self._thinking == "keep" else text

    def _write(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        asks: bool,
    ) -> str:
        written = apply_chat_template(
            self._tokenizer, cast(Any, self.placed(messages)), tools, arguments, add_generation_prompt=asks
        )
        return cast(str, written)


def _writes_system_anywhere(tokenizer: Any) -> bool:
    """Return whether the chat template writes every system message, and each one in its place.

    Some write only the first one, move all of them to the top, or refuse the chat.
    """
    roles = ("system", "system", "user", "system")
    marks = [f"{_MARK}-{number}" for number in range(len(roles))]
    chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    try:
        written = apply_chat_template(tokenizer, cast(Any, chat))
    except DataError:
        return False
    return re.findall(rf"{_MARK}-\d", cast(str, written)) == marks
