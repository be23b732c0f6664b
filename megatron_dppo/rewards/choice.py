"""Builds the configured reward: one reward or a weighted sum, values of right and wrong, and thinking."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.errors import Problem
from megatron_dppo.rewards.base import (
    ENVIRONMENT,
    REWARDS,
    Reward,
    RewardRequest,
    RewardResult,
    checked,
    problem_with,
    reward,
)
from megatron_dppo.types import FinishReason, Prompt

Thinking = Literal["ignore", "require"]
_THINKING_ENDS = "</think>"


@dataclass(frozen=True)
class RewardChoice:
    """The settings of rewards in `[data]`.

    Attributes:
        reward: A reward's name, weights by name, or "environment".
        values: Values of a wrong and a right response, instead of a registered reward's 0 and 1. Users'
            functions return their own values.
        thinking: "require" passes only the text after `</think>` to a registered reward. A response without
            `</think>`, or with several, is wrong.
    """

    reward: str | Mapping[str, float]
    values: tuple[float, float] = (0.0, 1.0)
    thinking: Thinking = "ignore"

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each reward, by its name."""
        return {self.reward: 1.0} if isinstance(self.reward, str) else self.reward

    @property
    def is_environment(self) -> bool:
        """Whether the environment gives every reward, and no function scores responses."""
        return self.reward == ENVIRONMENT

    @property
    def text(self) -> str:
        """Choice as a worker's argument: the reward's name if the other settings are defaults, else JSON."""
        if self == RewardChoice(self.reward) and isinstance(self.reward, str):
            return self.reward
        reward = self.reward if isinstance(self.reward, str) else dict(self.reward)
        return json.dumps({"reward": reward, "values": self.values, "thinking": self.thinking})

    @classmethod
    def read(cls, text: str) -> "RewardChoice":
        """Return the choice that a worker's argument `text` encodes."""
        if not text.startswith("{"):
            return cls(text)
        fields = json.loads(text)
        return cls(fields["reward"], tuple(fields["values"]), fields["thinking"])


def problems_with(choice: RewardChoice) -> Iterator[Problem]:
    """Yield the problems of a choice, without running a user's code."""
    names = [] if choice.is_environment else list(choice.weights)
    yield from (problem for problem in map(problem_with, names) if problem is not None)
    if not choice.reward and isinstance(choice.reward, str):
        return  # the other settings depend on which reward it is
    if not any(choice.weights.values()):
        expected = "at least one reward with a weight that is not 0"
        yield Problem("data.reward", repr(dict(choice.weights)), expected, "Name a reward.")
    for label in {_label(name) for name in names if sum(_label(other) == _label(name) for other in names) > 1}:
        action = "Rename a function: its name is part of the metrics' names."
        yield Problem("data.reward", f"two rewards called {label!r}", "one reward per name", action)
    wrong, right = choice.values
    if not (wrong < right and math.isfinite(right - wrong)):
        action = "Write the value of a wrong response first, then the larger value of a right response."
        yield Problem("data.reward_values", str(list(choice.values)), "two increasing numbers", action)
    if not REWARDS.keys() & set(names):
        expected = f"no such setting without one of {sorted(REWARDS)}: a function gets complete responses"
        action = "Leave it out, or set it back to {}, and implement it in the function."
        if choice.values != RewardChoice.values:
            default = list(RewardChoice.values)
            yield Problem("data.reward_values", str(list(choice.values)), expected, action.format(default))
        if choice.thinking != RewardChoice.thinking:
            default = repr(RewardChoice.thinking)
            yield Problem("data.thinking", repr(choice.thinking), expected, action.format(default))


def chosen(choice: RewardChoice) -> Reward:
    """Return the reward of a choice. A user's modules are imported, and their exceptions are passed on.

    Raises:
        ConfigError: No reward has one of the names. The message lists the rewards.
    """
    if isinstance(choice.reward, str):
        return _under_rules(choice.reward, choice)
    parts = {_label(name): (weight, _under_rules(name, choice)) for name, weight in choice.reward.items()}

    def weighted_sum(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Return the weighted sum. Info has each part's value by its name, and its info as `part/key`."""
        request = RewardRequest(prompt, response, finish_reason)
        results = {label: checked(part, request) for label, (_, part) in parts.items()}
        value = math.fsum(parts[label][0] * result.value for label, result in results.items())
        info = {label: result.value for label, result in results.items()}
        for label, result in results.items():
            info |= {f"{label}/{key}": number for key, number in result.info.items()}
        return RewardResult(value, info)

    return weighted_sum


def after_thinking(response: str) -> str | None:
    """Return the text after the only `</think>` of a response, or `None` without one or with several."""
    thoughts = response.split(_THINKING_ENDS, maxsplit=2)
    return thoughts[1] if len(thoughts) == 2 else None


def _label(name: str) -> str:
    """Return the name of a reward in metrics: its registered name, or the function without its module."""
    return name.rpartition(":")[2]


def _under_rules(name: str, choice: RewardChoice) -> Reward:
    """Return a reward by name. A registered reward uses the choice's values and thinking."""
    function = reward(name)
    if name not in REWARDS or (choice.values, choice.thinking) == (RewardChoice.values, RewardChoice.thinking):
        return function
    wrong, right = choice.values

    def under_rules(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score with the values of right and wrong. Info has `ends_thinking` if thinking is required."""
        info: dict[str, float] = {}
        if choice.thinking == "require":
            rest = after_thinking(response)
            info["ends_thinking"] = float(rest is not None)
            response = rest or ""
        result = function(prompt, response, finish_reason)
        value = (1.0 - result.value) * wrong + result.value * right
        return RewardResult(value, {**result.info, **info})

    return under_rules
