"""Turns chats into token ids, by the chat template or by a renderer of the library `renderers`."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_dppo.agents.chat import ChatMessage, arguments_of, parse_response
from megatron_dppo.data.prompts.templates import (
    apply_chat_template,
    prompt_tokens,
    require_chat_template,
    require_whole,
    unwritten,
)
from megatron_dppo.errors import DataError, Problem

Thinking = Literal["keep", "template"]
_MARK = "the-response-stands-here"
_THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_THOUGHT_ENDS = "</think>"
_THOUGHT_OF = f"<think>\n{{}}\n{_THOUGHT_ENDS}\n\n"
_NUM_LAST = 16  # tokens of a prompt, of which the last may open a thought
KEY = "rollout.agent.renderer"
_ACTION = (
    "Use a model or a tokenizer whose chat template writes it, since the policy does not see it otherwise, or "
    "let the agent send its request without it."
)
_TRIAL: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
)


class Rendering:
    """Renders chats with a tokenizer. Sampled tokens are never encoded again."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        """Store the tokenizer.

        Args:
            tokenizer: Tokenizer of the model.
            thinking: "keep" continues a sequence although the template would now leave out its earlier
                thinking; "template" does not.
        """
        require_chat_template(tokenizer)
        self._tokenizer, self._thinking = tokenizer, thinking
        self._has_system_anywhere = _writes_system_anywhere(tokenizer)

    def opening(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the token ids of a complete chat, up to the beginning of the response."""
        placed = cast(Any, self.placed(messages))
        tokens = prompt_tokens(self._tokenizer, None, placed, tools, arguments)
        require_whole(self._tokenizer, placed, tools, arguments, _ACTION)
        return tokens

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
            None if the template does not append: the new messages change how it writes the earlier ones, or
            it omits a part of them.
        """
        thought = ""
        if self._thinking == "template" and _THOUGHT_ENDS in self._tokenizer.decode(list(response)):
            thought = _THOUGHT_OF.format("well")
        answered = [*path, {"role": "assistant", "content": f"{thought}{_MARK}{added}"}]
        try:
            before = self._write(answered, tools, arguments, asks=False)
            after = self._write([*answered, *new], tools, arguments, asks=True)
            placed = cast(Any, self.placed([*answered, *new]))
            if unwritten(self._tokenizer, placed, tools, arguments, len(new)):
                return None  # the opening has the sentence for the client
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

    def keeps_thoughts(self) -> bool:
        """Return whether the chat template keeps the thought of a response if a message of a user follows."""
        asked, thought = _TRIAL[-1], _THOUGHT_OF.format(_MARK)
        answered: ChatMessage = {"role": "assistant", "content": f"{thought}5"}
        return _MARK in self._write([asked, answered, asked], (), {}, asks=True)

    def writes_tools(self) -> bool:
        """Return whether the chat template writes tools, calls of them, and their results."""
        function = {"name": "look_up", "description": "Look a word up.", "parameters": {"type": "object"}}
        call = {"id": "call_0_0", "type": "function", "function": {"name": "look_up", "arguments": {}}}
        asked, called = _TRIAL[-1], {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "a result", "tool_call_id": "call_0_0"}
        tools, chat = [{"type": "function", "function": function}], cast(Any, [asked, called, result])
        try:
            return not unwritten(self._tokenizer, chat, tools, {})
        except DataError:
            return False

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
        is_thinking = self.text(prompt[-_NUM_LAST:]).rstrip().endswith("<think>")
        return parse_response(self.text(ids), number, may_call=may_call, is_thinking=is_thinking)

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


class LibraryRendering(Rendering):
    """Openings are by the chat template; responses are read, and continued, by a renderer of the library."""

    def __init__(self, tokenizer: Any, thinking: Thinking, name: str) -> None:
        """Make the renderer.

        Args:
            tokenizer: Tokenizer of the model.
            thinking: See `Rendering`.
            name: Name of the renderer, such as "glm-4.5".
        """
        super().__init__(tokenizer, thinking)
        self._name, self._made = name, dict[str, Any]()
        self._renderer({})

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
        """Return what `Rendering.continuation` does, by the renderer if it can append the messages."""
        if not added:
            before, renderer = [*prompt, *response], self._renderer(arguments)
            added_messages = self.placed([*path, {"role": "assistant", "content": ""}, *new])[-len(new) :]
            bridged = renderer.bridge_to_next_turn(
                list(prompt), list(response), added_messages, tools=list(tools) or None
            )
            if bridged is not None and bridged.token_ids[: len(before)] == before:
                return torch.tensor(bridged.token_ids[len(before) :], dtype=torch.int64)
        return super().continuation(prompt, response, path, added, new, tools, arguments)

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
        """Return what `Rendering.read` does; a tool call has a `native_id` if the family's format has ids."""
        found = self._renderer(arguments).parse_response(
            list(ids), tools=list(tools) or None, prompt_ids=list(prompt)
        )
        calls = [call for call in found.tool_calls if call.status == "ok" and _is_called(call)]
        is_all_thinking = not found.content and not calls  # as if it had begun, and never ended
        if is_all_thinking or len(calls) < len(found.tool_calls) or (calls and not may_call):
            return super().read(ids, prompt, number, tools, arguments, may_call=False)
        message: ChatMessage = {"role": "assistant", "content": found.content}
        if found.reasoning_content:
            message["reasoning_content"] = found.reasoning_content.strip()
        if calls:
            message["tool_calls"] = [_called(call, number, n) for n, call in enumerate(calls)]
        return message

    def _renderer(self, arguments: Mapping[str, Any]) -> Any:
        """Return the renderer for arguments of the chat template."""
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key not in self._made:
            try:
                import renderers  # an optional extra

                config: Any = renderers.config_from_name(self._name)
                if config is not None and self._thinking == "keep":
                    config = type(config)(thinking_retention="all")
                self._made[key] = renderers.create_renderer(
                    self._tokenizer, config, chat_template_kwargs=arguments or None
                )
            except Exception as error:  # the library raises whatever it likes
                found = f"{self._name!r} ({type(error).__name__}: {error})"
                raise RendererError(_problem(found)) from error
        return self._made[key]

    def writes_as_the_template(self) -> bool:
        """Return whether the renderer writes a chat as the tokenizer's chat template does."""
        own = self._renderer({}).render_ids(list(_TRIAL), add_generation_prompt=True)
        return own == list(prompt_tokens(self._tokenizer, None, cast(Any, _TRIAL)))


def problem_with_renderer(tokenizer: Any, name: str) -> Problem | None:
    """Return a problem if a renderer cannot be made for a tokenizer, or differs from its chat template."""
    try:
        if LibraryRendering(tokenizer, "keep", name).writes_as_the_template():
            return None
    except RendererError as error:
        return error.problem
    return _problem(f"{name!r}, which writes a chat in another way than the tokenizer's chat template")


class RendererError(DataError):
    """A renderer cannot be made."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _problem(found: str) -> Problem:
    action = (
        "Install the extra megatron_dppo[agents], name the renderer of the model's family, or leave it out: "
        "then the chat template alone renders, and tool calls are JSON in <tool_call>."
    )
    return Problem(KEY, found, "a renderer of the library renderers that fits the model's tokenizer", action)


def _is_called(call: Any) -> bool:
    """Return whether a call's arguments are an object."""
    return isinstance(arguments_of(call.arguments), Mapping)


def _called(call: Any, number: int, place: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call.arguments)}
    native = {"native_id": call.id} if call.id else {}
    return {"id": f"call_{number}_{place}", "type": "function", "function": function, **native}
