"""Renders new messages and reads responses by the library `renderers`, which knows the formats of families."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.agents.chat import ChatMessage, arguments_of
from megatron_dppo.agents.rendering import Rendering, Thinking
from megatron_dppo.errors import DataError, Problem

KEY = "rollout.agent.renderer"
_TRIAL: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
)


class LibraryRendering(Rendering):
    """Openings are by the chat template; responses are read, and continued, by a renderer of the library."""

    def __init__(self, tokenizer: Any, thinking: Thinking, name: str) -> None:
        """Make the renderer.

        Args:
            tokenizer: Tokenizer of the model.
            thinking: As for `Rendering`.
            name: Name of the renderer, such as "glm-4.5".

        Raises:
            RendererError: The library is absent or has no such renderer, or the tokenizer lacks its tokens.
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
            bridged = renderer.bridge_to_next_turn(
                list(prompt), list(response), list(new), tools=list(tools) or None
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
        calls = [call for call in found.tool_calls if call.status == "ok"]
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
        """Return the renderer for arguments of the chat template.

        Raises:
            RendererError: It does not know them, or cannot be made.
        """
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
        return own == list(self.opening(_TRIAL, (), {}))


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


def _called(call: Any, number: int, place: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call.arguments)}
    native = {"native_id": call.id} if call.id else {}
    return {"id": f"call_{number}_{place}", "type": "function", "function": function, **native}
