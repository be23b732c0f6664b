"""Multi-turn rollouts: the policy and an environment take turns within one trajectory.

A conversation is token ids from its first to its last: what was sampled stays as it was sampled, and what an
environment says is tokenised alone and put behind it. A turn is one request, whose prompt is all that was said
before. A question with one answer is a conversation of one turn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from megatron_dppo.environments import EnvironmentFault, Environments, Episode, Play, Response, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.rollout.engine import (
    Completion,
    InterruptibleEngine,
    IsEnough,
    Request,
    RolloutEngine,
    SamplingParams,
)
from megatron_dppo.rollout.partials import with_observation
from megatron_dppo.rollout.scoring import Tokenizer, as_text


@dataclass(frozen=True)
class TurnLimits:
    """When a conversation ends that its environment would go on with."""

    max_turns: int = 1
    max_turn_tokens: int | None = None  # sampled in one turn; none: as many as the response may have


class Conversations:
    """An engine whose responses are whole conversations; implements `rollout.engine.InterruptibleEngine`.

    All open conversations take a turn together: one call of the engine, then one of the environments. A
    conversation whose limits end it before its environment does has finish_reason "length".
    """

    def __init__(
        self, engine: RolloutEngine, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits
    ) -> None:
        self._engine, self._environments, self._limits = engine, environments, limits
        self._speech = Speech(tokenizer)

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
        """One conversation per request, with its `episode`; see `RolloutEngine.generate`.

        `params.max_response_tokens` bounds all that is said after the prompt, observations included.

        Raises:
            RolloutError: As the engine does.
        """
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        talks = [_Talk(request) for request in requests]
        still_open = talks
        while still_open:
            completions = self._engine.generate([talk.next for talk in still_open], params)
            answered = [
                talk
                for talk, completion in zip(still_open, completions, strict=True)
                if talk.hear(completion, self._speech)
            ]
            turns = self._environments.step([talk.play for talk in answered])
            still_open = [
                talk
                for talk, turn in zip(answered, turns, strict=True)
                if talk.goes_on(turn, self._limits, params, self._speech)
            ]
        return [talk.completion for talk in talks]

    def generate_until(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough
    ) -> list[Completion]:
        """Conversations of one turn, until it is enough; see `InterruptibleEngine.generate_until`.

        Raises:
            RolloutError: As the engine does, or conversations may have more turns.
        """
        if self._limits.max_turns > 1:
            raise RolloutError(
                f"found conversations of up to {self._limits.max_turns} turns, to be left half done; expected "
                "one turn. Set rollout.over_sampling = 1."
            )
        params = replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        engine = cast(InterruptibleEngine, self._engine)  # checks.sampling_rules demands it
        talks = [_Talk(request) for request in requests]
        completions = engine.generate_until(requests, params, is_enough)
        pairs = zip(talks, completions, strict=True)
        answered = [talk for talk, completion in pairs if talk.hear(completion, self._speech)]
        for talk, turn in zip(answered, self._environments.step([t.play for t in answered]), strict=True):
            talk.goes_on(turn, self._limits, params, self._speech)
        return [talk.completion for talk in talks]


@dataclass
class _Talk:
    """One conversation, from its request to its completion."""

    request: Request
    next: Request = field(init=False)  # what the engine is asked for
    completion: Completion = field(init=False)  # all that was said after the prompt
    responses: tuple[Response, ...] = ()
    reward: float | None = None
    info: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.next = self.request

    @property
    def play(self) -> Play:
        """What its environment is told."""
        assert self.request.prompt is not None, "requests of groups name their prompts"
        return Play(self.request.id, self.request.prompt, self.responses)

    def hear(self, completion: Completion, speech: "Speech") -> bool:
        """Take what was sampled; whether it is a response."""
        self.completion = completion
        if completion.finish_reason == "abort":
            return False
        said = (
            self.next.partial if self.responses else None
        )  # before the first turn, it is of the same response
        start = said.tokens.numel() if said is not None else 0
        text = speech.text(completion.tokens[start:])
        self.responses = (*self.responses, Response(text, completion.finish_reason))
        return True

    def goes_on(
        self, turn: Turn | EnvironmentFault, limits: TurnLimits, params: SamplingParams, speech: "Speech"
    ) -> bool:
        """Take what the environment says; whether there is a next turn."""
        if isinstance(turn, EnvironmentFault):
            self._end(fault=turn.message)
            return False
        if turn.reward is not None:
            self.reward = (self.reward or 0.0) + turn.reward
        self.info |= turn.info
        if turn.done:
            self._end()
            return False
        assert turn.observation is not None, "an environment that goes on says something"
        last_token = int(self.completion.tokens[-1])
        tokens = speech.observation(turn.observation, last_token, is_chat=self.request.is_chat)
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


class Speech:
    """What is said, between text and token ids."""

    _MARK = "the-response-stands-here"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, tokens: Tensor) -> str:
        """A response `[N]` int64, without special tokens."""
        return as_text(self._tokenizer, tokens, has_special_tokens=False)

    def observation(self, text: str, last_token: int, *, is_chat: bool) -> Tensor:
        """Token ids `[N]` int64 of what an environment says behind a response that ends with `last_token`.

        In a chat they are those of a user's message, and of the end of the response where it has none.
        """
        if is_chat:
            text = self._as_message(text)
        ids = cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))
        if is_chat and ids and ids[0] == last_token:
            ids = ids[1:]
        return torch.tensor(ids, dtype=torch.int64)

    def _as_message(self, text: str) -> str:
        """What the chat template writes from the end of a response to the beginning of the next."""
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
