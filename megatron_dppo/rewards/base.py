"""What a reward is, and the registry that `data.reward` names one from."""

import difflib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from megatron_dppo.errors import ConfigError, Problem, RewardError
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
    """The reward registered under `name`, or the function that "package.module:function" names.

    Such a module is imported, from the working directory too; no other user code ever is.

    Raises:
        ConfigError: There is none of that name; the message lists those there are.
    """
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return _imported(name)
    close = difflib.get_close_matches(name, _registered, n=1)
    action = f"Did you mean {close[0]!r}?" if close else "Choose one of these, or name your own function."
    expected = f"one of {sorted(_registered)}, or 'package.module:function'"
    raise ConfigError(Problem("data.reward", repr(name), expected, action))


def _imported(name: str) -> Reward:
    module_name, _, attribute = name.partition(":")
    expected = "a function that can be imported, as 'package.module:function'"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        action = "Check the name; modules are looked for in the working directory and among installed packages."
        raise ConfigError(Problem("data.reward", f"{name!r} ({error})", expected, action)) from error
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        found = f"{name!r}, and {module_name} has no function {attribute!r}"
        raise ConfigError(Problem("data.reward", found, expected, "Correct the name after the colon."))
    return cast(Reward, function)


def checked(function: Reward, prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """What the reward says, once it is known to be finite numbers.

    Raises:
        RewardError: The reward raised, returned something else, or a number that is not finite.
        MemoryError: As the reward raised it.
    """
    try:
        result = function(prompt, response, finish_reason)
        value, info = float(result.value), {name: float(number) for name, number in result.info.items()}
    except MemoryError:
        raise
    except Exception as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"prompt {prompt.id}: the reward raised {type(error).__name__}: {error}") from error
    wrong = {name: number for name, number in {**info, "value": value}.items() if not math.isfinite(number)}
    if wrong:
        raise RewardError(f"prompt {prompt.id}: found {wrong}; expected finite numbers. Correct the reward.")
    return RewardResult(value, info)
