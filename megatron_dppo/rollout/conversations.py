"""Runs conversations: the policy and an environment take turns within one trajectory.

A trajectory is one sequence of token ids. Sampled tokens are never encoded again; an environment's observation
is tokenised separately and appended. A turn is one request with the trajectory so far as its prompt. Runs
without an environment need no conversation: `trajectories` samples each response with one request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from megatron_dppo.agents.chat import ChatMessage
from megatron_dppo.agents.rendering import Rendering, Thinking
from megatron_dppo.engines.base import (
    KEYS_APART,
    Ask,
    Request,
    SamplingParams,
    num_tokens_before,
    with_observation,
)
from megatron_dppo.environments import EnvironmentFault, Environments, Episode, Response, Trajectory, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.scoring import Tokenizer, as_text, ids_of
from megatron_dppo.types import FinishReason, Sample


@dataclass(frozen=True)
class TurnLimits:
    """Limits that end a trajectory before its environment does."""

    max_turns: int = 1
    max_turn_tokens: int | None = None  # tokens sampled in one turn; `None` means max_response_tokens
    thinking: Thinking = "keep"  # "template": a new conversation begins where the template leaves thinking out


class Conversations:
    """Runs independent conversations: none waits for the response or the environment of another one.

    It keeps no state between calls. Any number of conversations may run at once, in one or several event loops.
    """

    def __init__(self, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits) -> None:
        self._environments, self._limits = environments, limits
        self._tokenizer, self._turn_tokenizer = tokenizer, TurnTokenizer(tokenizer)

    async def run(self, request: Request, params: SamplingParams, ask: Ask) -> Sample:
        """Sample one trajectory, and return it with its `episode`.

        With `TurnLimits.thinking` "template" it may be several conversations. The last one is returned, with
        the others as its `branches`; each sampled token is trained on once. If a limit ends the trajectory
        before its environment does, finish_reason is "length". An aborted response ends the trajectory without
        an episode.

        Args:
            request: Request that opens the trajectory.
            params: Sampling parameters. `max_response_tokens` bounds all tokens after the prompt, observations
                included. `TurnLimits.max_turn_tokens` replaces `max_turn_tokens`.
            ask: Function that samples a turn. It may sample several parts (`engines.base.resume_request`), and
                returns the complete turn.

        Raises:
            RolloutError: `ask` raised it.
            EnvironmentFailedError: The environment cannot be loaded, or its requests time out.
        """
        assert request.prompt is not None, "requests of groups name their prompts"
        if params.max_turn_tokens != self._limits.max_turn_tokens:
            params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        state = _TrajectoryState(Trajectory(request.id, request.prompt), request)
        most, completion, start = params.max_response_tokens, await ask(request, params), 0
        while completion.finish_reason != "abort":
            response = ids_of(completion.tokens)[start:]
            state.add(self._turn_tokenizer.text(response), completion.finish_reason)
            turn = await self._environments.answer(state.trajectory)
            after = self._after(state, request, completion, turn, params, response)
            if isinstance(after, Sample):
                return after
            request, start = after, num_tokens_before(after)
            params = replace(params, max_response_tokens=most - state.num_added(request.prompt_tokens))
            completion = await ask(request, params)
        return completion

    def _after(
        self,
        state: "_TrajectoryState",
        request: Request,
        completion: Sample,
        turn: Turn | EnvironmentFault,
        params: SamplingParams,
        response: Sequence[int],
    ) -> Sample | Request:
        """Return the request for the next response after a turn, or the completion if the turn is the last.

        `response` has the token ids of the response before the turn.
        """
        whole = state.whole(completion, request)
        if isinstance(turn, EnvironmentFault):
            return replace(whole, episode=state.episode(fault=turn.message))
        state.reward_turn(turn)
        if turn.done:
            return replace(whole, episode=state.episode())
        assert turn.observation is not None, "a turn that does not end the trajectory has an observation"
        cut = replace(whole, finish_reason="length", episode=state.episode())
        if len(state.trajectory.responses) == self._limits.max_turns:
            return cut
        tokens = self._between(state, request, turn.observation, response)
        if isinstance(tokens, Tensor):
            is_full = completion.tokens.numel() + tokens.numel() >= params.max_response_tokens
            return cut if is_full else replace(request, partial=with_observation(completion, tokens))
        is_full = state.num_added(tokens) >= params.max_response_tokens + state.num_added(request.prompt_tokens)
        return cut if is_full else state.begin_again(whole, tokens)

    def _between(
        self, state: "_TrajectoryState", request: Request, observation: str, response: Sequence[int]
    ) -> Tensor | tuple[int, ...]:
        """Return the token ids `[N]` of an observation, or the prompt of a conversation that begins with it."""
        arguments = (request.prompt.template_arguments if request.prompt is not None else None) or {}
        if request.messages is None or self._limits.thinking == "keep":
            last = response[-1] if response else None
            given: Any = {"is_chat": request.is_chat, "template_arguments": arguments}
            return self._turn_tokenizer.observation(observation, last, **given)
        rendering = Rendering(self._tokenizer, self._limits.thinking)
        path, new = state.messages, {"role": "user", "content": observation}
        tools = (request.prompt.tools if request.prompt is not None else None) or ()
        tokens = rendering.continuation(request.prompt_tokens, response, path, "", [new], tools, arguments)
        state.messages += [{"role": "assistant", "content": state.trajectory.responses[-1].text}, new]
        return rendering.opening(state.messages, tools, arguments) if tokens is None else tokens


@dataclass
class _TrajectoryState:
    """Texts and rewards of one trajectory so far; its tokens are in its requests and completions."""

    trajectory: Trajectory
    first: Request
    reward: float | None = None
    info: dict[str, float] = field(default_factory=dict[str, float])
    done: list[Sample] = field(default_factory=list[Sample])  # conversations before the present one

    def __post_init__(self) -> None:
        self.messages: list[ChatMessage] = [cast(ChatMessage, each) for each in self.first.messages or ()]

    def num_added(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a conversation's prompt has more than the first one's."""
        return len(prompt) - len(self.first.prompt_tokens)

    def begin_again(self, completion: Sample, prompt: tuple[int, ...]) -> Request:
        """Return the request of a new conversation, after the one that ends with `completion`."""
        self.done.append(replace(completion, branches=()))
        seed, rollout, sample = self.first.noise_key
        key = seed, rollout, sample + KEYS_APART * len(self.done)
        return replace(self.first, prompt_tokens=prompt, noise_key=key, partial=None)

    def whole(self, completion: Sample, request: Request) -> Sample:
        """Return the completion of a request with its prompt, and the conversations before it."""
        prompt = request.prompt_tokens if self.done else None
        return replace(completion, prompt_tokens=prompt, branches=tuple(self.done))

    def add(self, text: str, finish_reason: FinishReason) -> None:
        """Add a response of the policy."""
        responses = (*self.trajectory.responses, Response(text, finish_reason))
        self.trajectory = replace(self.trajectory, responses=responses)

    def reward_turn(self, turn: Turn) -> None:
        """Add the reward and info of an environment's turn."""
        if turn.reward is not None:
            self.reward = (self.reward or 0.0) + turn.reward
        self.info |= turn.info

    def episode(self, fault: str | None = None) -> Episode:
        """Return the outcome of the trajectory."""
        responses = self.trajectory.responses
        return Episode(responses[-1].text, len(responses), self.reward, self.info, fault)


class TurnTokenizer:
    """Converts between the text of turns and token ids."""

    _MARK = "the-response-stands-here"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, ids: Sequence[int]) -> str:
        """Decode a response without special tokens."""
        return as_text(self._tokenizer, ids, has_special_tokens=False)

    def observation(
        self,
        text: str,
        last_token: int | None,
        *,
        is_chat: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Encode an observation as token ids `[N]` int64, to follow a response that ends with `last_token`.

        For a chat prompt these are the tokens of a user message. The end-of-turn token of the response comes
        first if the response lacks it.

        Args:
            text: Observation.
            last_token: Last token of the response, or None for a response without a token.
            is_chat: Whether the prompt is a list of messages.
            template_arguments: Arguments of the chat template, from the prompt.
        """
        if is_chat:
            text = self._as_message(text, template_arguments or {})
        ids = cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))
        if is_chat and ids and ids[0] == last_token:
            ids = ids[1:]
        return torch.tensor(ids, dtype=torch.int64)

    def _as_message(self, text: str, arguments: Mapping[str, Any]) -> str:
        """Return the chat template's text between the end of a response and the beginning of the next."""
        turns = [("user", "?"), ("assistant", self._MARK), ("user", text)]
        conversation = [{"role": role, "content": content} for role, content in turns]
        written = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, return_dict=False, **arguments
        )
        _, mark, rest = cast(str, written).partition(self._MARK)
        if not mark:
            raise RolloutError(
                "the tokenizer's chat template: found that it leaves out an earlier message of the assistant; "
                "expected the complete message. Use a template that keeps earlier turns."
            )
        return rest
