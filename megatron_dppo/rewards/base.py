"""What a reward is, and the registry that `data.reward` names one from."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import FinishReason, Prompt


@dataclass(frozen=True)
class RewardResult:
    """A response's score, and what else is worth a metric."""

    value: float
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Reward(Protocol):
    """Scores one response to one prompt.

    It must be a pure function of its arguments: the same rollout scored again, on another rank or after a
    resume, gives the same values. It may raise; `rollout.collect` drops and counts the sample then, as it does
    where the value is not finite.
    """

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score a response.

        Args:
            prompt: What was asked; `prompt.answer` is the reference.
            response: The response as text, special tokens such as end-of-sequence left out.
            finish_reason: "stop" where the model ended the response itself.
        """
        ...


_AnyReward = TypeVar("_AnyReward", bound=Reward)
_registered: dict[str, Reward] = {}
REWARDS: Mapping[str, Reward] = MappingProxyType(_registered)
"""Every registered reward by name, read-only; `register` adds to it."""


def register(name: str) -> Callable[[_AnyReward], _AnyReward]:
    """Decorate a reward with the name that configs use.

    Raises:
        ConfigError: The name is taken.
    """

    def add(function: _AnyReward) -> _AnyReward:
        if name in _registered:
            found = f"a second registration of {name!r}"
            raise ConfigError(Problem("rewards", found, "one reward per name", "Choose another name."))
        _registered[name] = function
        return function

    return add


def reward(name: str) -> Reward:
    """The reward registered under `name`.

    Raises:
        ConfigError: There is none of that name; the message lists those there are.
    """
    if name in _registered:
        return _registered[name]
    close = difflib.get_close_matches(name, _registered, n=1)
    action = f"Did you mean {close[0]!r}?" if close else "Choose one of these, or register your own."
    raise ConfigError(Problem("data.reward", repr(name), f"one of {sorted(_registered)}", action))
