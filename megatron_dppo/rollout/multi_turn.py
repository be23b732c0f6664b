"""Multi-turn rollouts: the policy and an environment take turns within one trajectory.

A trajectory is one sequence of token ids: sampled tokens stay as they were sampled, and an environment's
observation is tokenised alone and appended. A turn is one request, whose prompt is the trajectory so far. A
question with one answer is a trajectory of one turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from megatron_dppo.environments import EnvironmentFault, Environments, Episode, Response, Trajectory, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.rollout.engine import (
    Completion,
    InterruptibleEngine,
    IsEnough,
    Request,
    RolloutEngine,
    SamplingParams,
    with_observation,
)
from megatron_dppo.rollout.scoring import Tokenizer, as_text


@dataclass(frozen=True)
class TurnLimits:
    """Limits that end a trajectory before its environment does."""

    max_turns: int = 1
    max_turn_tokens: int | None = None  # sampled in one turn; none: as many as the response may have


class MultiTurnEngine:
    """Samples whole trajectories with an engine; implements `rollout.engine.InterruptibleEngine`.

    All open trajectories take a turn together: one call of the engine, then one of the environments. A
    trajectory that its limits end before its environment does has finish_reason "length".
    """

    def __init__(
        self, engine: RolloutEngine, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits
    ) -> None:
        self._engine, self._environments, self._limits = engine, environments, limits
        self._turn_tokenizer = TurnTokenizer(tokenizer)

    @property
    def weight_version(self) -> int:
        """See `RolloutEngine.weight_version`."""
        return self._engine.weight_version

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        return self._engine.counts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See `RolloutEngine.load_weights`."""
        return self._engine.load_weights(weights, version)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one trajectory per request, with its `episode`; see `RolloutEngine.generate`.

        `params.max_response_tokens` bounds all tokens after the prompt, observations included.

        Raises:
            RolloutError: As the engine does.
        """
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        trajectories = [_OpenTrajectory(request) for request in requests]
        still_open = trajectories
        while still_open:
            completions = self._engine.generate([trajectory.next for trajectory in still_open], params)
            answered = [
                trajectory
                for trajectory, completion in zip(still_open, completions, strict=True)
                if trajectory.add_response(completion, self._turn_tokenizer)
            ]
            turns = self._environments.step([trajectory.so_far for trajectory in answered])
            still_open = [
                trajectory
                for trajectory, turn in zip(answered, turns, strict=True)
                if trajectory.add_turn(turn, self._limits, params, self._turn_tokenizer)
            ]
        return [trajectory.completion for trajectory in trajectories]

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
        trajectories = [_OpenTrajectory(request) for request in requests]
        completions = engine.generate_until(requests, params, is_enough)
        pairs = zip(trajectories, completions, strict=True)
        answered = [
            trajectory
            for trajectory, completion in pairs
            if trajectory.add_response(completion, self._turn_tokenizer)
        ]
        for trajectory, turn in zip(
            answered, self._environments.step([t.so_far for t in answered]), strict=True
        ):
            trajectory.add_turn(turn, self._limits, params, self._turn_tokenizer)
        return [trajectory.completion for trajectory in trajectories]


@dataclass
class _OpenTrajectory:
    """Tracks one trajectory, from its request to its completion."""

    request: Request
    next: Request = field(init=False)  # what the engine is asked for
    completion: Completion = field(init=False)  # all tokens after the prompt
    responses: tuple[Response, ...] = ()
    reward: float | None = None
    info: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.next = self.request

    @property
    def so_far(self) -> Trajectory:
        """The trajectory so far, in the form that environments receive."""
        assert self.request.prompt is not None, "requests of groups name their prompts"
        return Trajectory(self.request.id, self.request.prompt, self.responses)

    def add_response(self, completion: Completion, turn_tokenizer: "TurnTokenizer") -> bool:
        """Add the sampled tokens; return whether they form a response."""
        self.completion = completion
        if completion.finish_reason == "abort":
            return False
        # Before the first turn, a partial is the beginning of the same response.
        earlier = self.next.partial if self.responses else None
        start = earlier.tokens.numel() if earlier is not None else 0
        text = turn_tokenizer.text(completion.tokens[start:])
        self.responses = (*self.responses, Response(text, completion.finish_reason))
        return True

    def add_turn(
        self,
        turn: Turn | EnvironmentFault,
        limits: TurnLimits,
        params: SamplingParams,
        turn_tokenizer: "TurnTokenizer",
    ) -> bool:
        """Add the environment's turn; return whether there is a next one."""
        if isinstance(turn, EnvironmentFault):
            self._end(fault=turn.message)
            return False
        if turn.reward is not None:
            self.reward = (self.reward or 0.0) + turn.reward
        self.info |= turn.info
        if turn.done:
            self._end()
            return False
        assert turn.observation is not None, "a turn that does not end the trajectory has an observation"
        last_token = int(self.completion.tokens[-1])
        tokens = turn_tokenizer.observation(turn.observation, last_token, is_chat=self.request.is_chat)
        num_tokens = self.completion.tokens.numel() + tokens.numel()
        if len(self.responses) == limits.max_turns or num_tokens >= params.max_response_tokens:
            self.completion = replace(self.completion, finish_reason="length")
            self._end()
            return False
        self.next = replace(self.request, partial=with_observation(self.completion, tokens))
        return True

    def _end(self, fault: str | None = None) -> None:
        last = self.responses[-1].text
        episode = Episode(last, len(self.responses), self.reward, self.info, fault)
        self.completion = replace(self.completion, episode=episode)


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
