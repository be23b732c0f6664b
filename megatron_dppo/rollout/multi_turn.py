"""Multi-turn rollouts: the policy and an environment take turns within one trajectory.

A trajectory is one sequence of token ids: sampled tokens stay as they were sampled, and an environment's
observation is tokenised alone and appended. A turn is one request, whose prompt is the trajectory so far. A
question with one answer is a trajectory of one turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from megatron_dppo.environments import EnvironmentFault, Environments, Episode, Response, Trajectory, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.engine import (
    Completion,
    EngineWrapper,
    InterruptibleEngine,
    IsEnough,
    Request,
    RolloutEngine,
    SamplingParams,
    with_observation,
)
from megatron_dppo.rollout.scoring import Tokenizer, as_text
from megatron_dppo.types import FinishReason


@dataclass(frozen=True)
class TurnLimits:
    """Limits that end a trajectory before its environment does."""

    max_turns: int = 1
    max_turn_tokens: int | None = None  # sampled in one turn; none: as many as the response may have


class MultiTurnEngine(EngineWrapper):
    """Samples whole trajectories with an engine; implements `rollout.engine.InterruptibleEngine`.

    All open trajectories take a turn together: one call of the engine, then one of the environments. A
    trajectory that its limits end before its environment does has finish_reason "length".
    """

    def __init__(
        self, engine: RolloutEngine, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits
    ) -> None:
        super().__init__(engine)
        self._environments, self._limits = environments, limits
        self._turn_tokenizer = TurnTokenizer(tokenizer)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one trajectory per request, with its `episode`; see `RolloutEngine.generate`.

        `params.max_response_tokens` bounds all tokens after the prompt, observations included.

        Raises:
            RolloutError: As the engine does.
        """
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        states, ended = _states(requests), dict[str, Completion]()
        while requests:
            completions = self._engine.generate(requests, params)
            after = self._take_turns(states, requests, completions, params)
            pairs = zip(requests, after, strict=True)
            ended |= {request.id: each for request, each in pairs if isinstance(each, Completion)}
            requests = [each for each in after if isinstance(each, Request)]
        return [ended[name] for name in states]

    def generate_until(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough
    ) -> list[Completion]:
        """Sample trajectories of one turn until enough are finished; see `InterruptibleEngine`.

        Raises:
            RolloutError: As the engine does, or trajectories may have more turns.
        """
        if self._limits.max_turns > 1:
            raise RolloutError(
                f"found conversations of up to {self._limits.max_turns} turns, to be left half done; expected "
                "one turn. Set rollout.over_sampling = 1."
            )
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        engine = cast(InterruptibleEngine, self._engine)  # checks.sampling_rules demands it
        completions = engine.generate_until(requests, params, is_enough)
        after = self._take_turns(_states(requests), requests, completions, params)
        return [cast(Completion, each) for each in after]  # a trajectory of one turn has no next request

    def _take_turns(
        self,
        states: Mapping[str, "_TrajectoryState"],
        requests: Sequence[Request],
        completions: Sequence[Completion],
        params: SamplingParams,
    ) -> list[Completion | Request]:
        """Answer each response with its environment's turn; return the request for the next, or the whole.

        Completions that the engine aborted are returned as they are.
        """
        after: dict[str, Completion | Request] = {
            request.id: completion for request, completion in zip(requests, completions, strict=True)
        }
        answered = [
            (request, completion, states[request.id])
            for request, completion in zip(requests, completions, strict=True)
            if completion.finish_reason != "abort"
        ]
        for request, completion, state in answered:
            # Before the first turn, a partial is the beginning of the same response.
            earlier = request.partial if state.trajectory.responses else None
            start = earlier.tokens.numel() if earlier is not None else 0
            state.add(self._turn_tokenizer.text(completion.tokens[start:]), completion.finish_reason)
        turns = self._environments.step([state.trajectory for _, _, state in answered])
        for (request, completion, state), turn in zip(answered, turns, strict=True):
            after[request.id] = self._after(state, request, completion, turn, params)
        return list(after.values())

    def _after(
        self,
        state: "_TrajectoryState",
        request: Request,
        completion: Completion,
        turn: Turn | EnvironmentFault,
        params: SamplingParams,
    ) -> Completion | Request:
        """Return the request for the next response after a turn; the completion, where there is none."""
        if isinstance(turn, EnvironmentFault):
            return replace(completion, episode=state.episode(fault=turn.message))
        state.reward_turn(turn)
        if turn.done:
            return replace(completion, episode=state.episode())
        assert turn.observation is not None, "a turn that does not end the trajectory has an observation"
        last_token = int(completion.tokens[-1])
        tokens = self._turn_tokenizer.observation(turn.observation, last_token, is_chat=request.is_chat)
        num_tokens, num_turns = completion.tokens.numel() + tokens.numel(), len(state.trajectory.responses)
        if num_turns == self._limits.max_turns or num_tokens >= params.max_response_tokens:
            return replace(completion, finish_reason="length", episode=state.episode())
        return replace(request, partial=with_observation(completion, tokens))


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


def _states(requests: Sequence[Request]) -> dict[str, _TrajectoryState]:
    states: dict[str, _TrajectoryState] = {}
    for request in requests:
        assert request.prompt is not None, "requests of groups name their prompts"
        states[request.id] = _TrajectoryState(Trajectory(request.id, request.prompt))
    assert len(states) == len(requests), "ids of requests differ"
    return states


class TurnTokenizer:
    """Converts between the text of turns and token ids."""

    _MARK = "the-response-stands-here"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, tokens: Tensor) -> str:
        """Decode a response `[N]` int64, without special tokens."""
        return as_text(self._tokenizer, tokens, has_special_tokens=False)

    def observation(self, text: str, last_token: int, *, is_chat: bool) -> Tensor:
        """Encode an observation as token ids `[N]` int64, to follow a response that ends with `last_token`.

        In a chat they are those of a user's message, and of the end of the response where it has none.
        """
        if is_chat:
            text = self._as_message(text)
        ids = cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))
        if is_chat and ids and ids[0] == last_token:
            ids = ids[1:]
        return torch.tensor(ids, dtype=torch.int64)

    def _as_message(self, text: str) -> str:
        """Return the chat template's text between the end of a response and the beginning of the next."""
        turns = [("user", "?"), ("assistant", self._MARK), ("user", text)]
        conversation = [{"role": role, "content": content} for role, content in turns]
        written = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, return_dict=False
        )
        _, mark, rest = cast(str, written).partition(self._MARK)
        if not mark:
            raise RolloutError(
                "the tokenizer's chat template: found an assistant's earlier message left out; "
                "expected it whole. Use a template that keeps earlier turns."
            )
        return rest
