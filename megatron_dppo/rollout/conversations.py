"""Conversations: the policy and an environment take turns within one trajectory, each at its own pace.

A trajectory is one sequence of token ids: sampled tokens stay as they were sampled, and an environment's
observation is tokenised alone and appended. A turn is one request, whose prompt is the trajectory so far. A
question with one answer is a trajectory of one turn.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from megatron_dppo.engines.base import (
    Completion,
    Request,
    SamplingParams,
    num_tokens_before,
    resumed,
    with_observation,
)
from megatron_dppo.environments import EnvironmentFault, Environments, Episode, Response, Trajectory, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.scoring import Tokenizer, as_text
from megatron_dppo.types import FinishReason

Ask = Callable[[Request, SamplingParams], Awaitable[Completion]]
"""Samples the response of one turn; it comes back aborted where there is none."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits that end a trajectory before its environment does."""

    max_turns: int = 1
    max_turn_tokens: int | None = None  # sampled in one turn; none: as many as the response may have


class Conversations:
    """Runs conversations one by one: none waits for another's response or for another's environment.

    It keeps no state between calls; any number of them may run at once, in one event loop or in several.
    """

    def __init__(self, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits) -> None:
        self._environments, self._limits = environments, limits
        self._turn_tokenizer = TurnTokenizer(tokenizer)

    async def run(self, request: Request, params: SamplingParams, ask: Ask) -> Completion:
        """Sample one trajectory, and return it with its `episode`.

        A trajectory that its limits end before its environment does has finish_reason "length"; one whose
        response comes back aborted ends with it, without an episode.

        Args:
            request: Opens the trajectory. A partial is the beginning of its first response.
            params: `max_response_tokens` bounds all tokens after the prompt, observations included;
                `max_turn_tokens` is replaced by that of the limits.
            ask: Samples a turn. It may do so in several parts (`engine.resumed`), and returns the whole.

        Raises:
            RolloutError: As `ask` does.
            EnvironmentFailedError: The environment cannot be loaded, or never answers.
        """
        assert request.prompt is not None, "requests of groups name their prompts"
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        state = _TrajectoryState(Trajectory(request.id, request.prompt))
        completion, start = await _first_response(request, params, ask), 0
        while completion.finish_reason != "abort":
            state.add(self._turn_tokenizer.text(completion.tokens[start:]), completion.finish_reason)
            turn = await self._environments.answer(state.trajectory)
            last_token = int(completion.tokens[-1]) if completion.tokens.numel() > start else None
            after = self._after(state, request, completion, turn, params, last_token)
            if isinstance(after, Completion):
                return after
            request, start = after, num_tokens_before(after)
            completion = await ask(request, params)
        return completion

    def _after(
        self,
        state: "_TrajectoryState",
        request: Request,
        completion: Completion,
        turn: Turn | EnvironmentFault,
        params: SamplingParams,
        last_token: int | None,
    ) -> Completion | Request:
        """Return the request for the next response after a turn, or the completion if the turn is the last.

        `last_token` is the last one of the response that the turn answers; none if the response is empty.
        """
        if isinstance(turn, EnvironmentFault):
            return replace(completion, episode=state.episode(fault=turn.message))
        state.reward_turn(turn)
        if turn.done:
            return replace(completion, episode=state.episode())
        assert turn.observation is not None, "a turn that does not end the trajectory has an observation"
        arguments = request.prompt.template_arguments if request.prompt is not None else None
        tokens = self._turn_tokenizer.observation(
            turn.observation, last_token, is_chat=request.is_chat, template_arguments=arguments
        )
        num_tokens, num_turns = completion.tokens.numel() + tokens.numel(), len(state.trajectory.responses)
        if num_turns == self._limits.max_turns or num_tokens >= params.max_response_tokens:
            return replace(completion, finish_reason="length", episode=state.episode())
        return replace(request, partial=with_observation(completion, tokens))


async def _first_response(request: Request, params: SamplingParams, ask: Ask) -> Completion:
    """Return the response that opens a trajectory; its tokens sampled before count among the turn's."""
    if request.partial is None:
        return await ask(request, params)
    rest = resumed(replace(request, partial=None), request.partial, params)
    return replace(request.partial, finish_reason="length") if rest is None else await ask(*rest)


@dataclass
class _TrajectoryState:
    """What was said and earned in one trajectory so far; its tokens are in its requests and completions."""

    trajectory: Trajectory
    reward: float | None = None
    info: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, text: str, finish_reason: FinishReason) -> None:
        """Add a response of the policy."""
        responses = (*self.trajectory.responses, Response(text, finish_reason))
        self.trajectory = replace(self.trajectory, responses=responses)

    def reward_turn(self, turn: Turn) -> None:
        """Add what a turn of the environment gives."""
        if turn.reward is not None:
            self.reward = (self.reward or 0.0) + turn.reward
        self.info |= turn.info

    def episode(self, fault: str | None = None) -> Episode:
        """Return the outcome."""
        responses = self.trajectory.responses
        return Episode(responses[-1].text, len(responses), self.reward, self.info, fault)


class TurnTokenizer:
    """Converts between the text of turns and token ids."""

    _MARK = "the-response-stands-here"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, tokens: Tensor) -> str:
        """Decode a response `[N]` int64, without special tokens."""
        return as_text(self._tokenizer, tokens, has_special_tokens=False)

    def observation(
        self,
        text: str,
        last_token: int | None,
        *,
        is_chat: bool,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Encode an observation as token ids `[N]` int64, to follow a response that ends with `last_token`.

        In a chat they are those of a user's message, and of the end of the response where it has none. The chat
        template gets the arguments of the prompt.

        Args:
            text: Observation.
            last_token: Last token of the response, or None for a response without a token.
            is_chat: Whether the prompt is a list of messages.
            template_arguments: Arguments of the chat template.
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
                "the tokenizer's chat template: found an assistant's earlier message left out; "
                "expected it whole. Use a template that keeps earlier turns."
            )
        return rest
