"""The interface of rewards, and the registry of their names for `data.reward`."""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, SupportsFloat, TypeVar, cast

from megatron_dppo.errors import ConfigError, Problem, RewardError
from megatron_dppo.runtime.user_code import described, imported, problem_with_path
from megatron_dppo.types import AnswerForm, FinishReason, Prompt

RewardFaultKind = Literal["reward_failed", "reward_timed_out", "reward_out_of_memory"]


@dataclass(frozen=True)
class RewardRequest:
    """One response to score."""

    prompt: Prompt
    response: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class RewardResult:
    """A response's score, and further numbers to report as metrics."""

    value: float
    info: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class RewardFault:
    """The reason why a response has no score."""

    kind: RewardFaultKind
    message: str


class Reward(Protocol):
    """Scores one response to one prompt.

    It must be a pure function of its arguments: the same rollout scored again, on another rank or after a
    resume, gives the same values. If it raises, or if the value is not finite, `rollout.scoring` drops and
    counts the sample.
    """

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score a response.

        Args:
            prompt: Prompt of the response. `prompt.answer` is the reference.
            response: Text of the response, without special tokens such as end-of-sequence.
            finish_reason: "stop" if the model ended the response itself.
        """
        ...


_AnyReward = TypeVar("_AnyReward", bound=Reward)
_registered: dict[str, Reward] = {}
_loads: dict[str, str] = {}
_reads: dict[str, AnswerForm] = {}
_PATH = "package.module:function"
REWARDS: Mapping[str, Reward] = MappingProxyType(_registered)
"""All registered rewards by name, read-only. `register` adds to it."""
ENVIRONMENT = "environment"
"""Value of `data.reward` if the environment gives every reward. No reward has this name."""


def register(
    name: str, *, loads: str | None = None, reads: AnswerForm | None = None
) -> Callable[[_AnyReward], _AnyReward]:
    """Decorate a reward with the name that configs use.

    Args:
        name: Unique.
        loads: Module that `reward` imports as well. Only workers pay for this import, when they start.
        reads: Form of answers that the reward understands. Prompts that request another form do not fit.

    Raises:
        ConfigError: The name is taken.
    """

    def add(function: _AnyReward) -> _AnyReward:
        if name in _registered or name == ENVIRONMENT:
            found = f"a second registration of {name!r}"
            raise ConfigError(Problem("rewards", found, "one reward per name", "Choose another name."))
        _registered[name] = function
        if loads is not None:
            _loads[name] = loads
        if reads is not None:
            _reads[name] = reads
        return function

    return add


def answer_form(name: str) -> AnswerForm | None:
    """Return the form of answers that a registered reward reads, or `None` for any form or another reward."""
    return _reads.get(name)


def problem_with(name: str) -> Problem | None:
    """Return the problem with the name of a reward function, without running the function."""
    if name in _registered:
        return None
    if name in ("", ENVIRONMENT):
        found = f"{name!r} in a sum" if name else "none"
        names = f"one of {sorted(_registered)}, {_PATH!r} for your own function"
        expected = f"{names}, or just {ENVIRONMENT!r} if rollout.environment gives the rewards"
        return Problem("data.reward", found, expected, "Name the reward of your prompts.")
    return problem_with_path("data.reward", name, _PATH, sorted(_registered))


def reward(name: str) -> Reward:
    """Return the reward registered under `name`, or the function named by "package.module:function".

    The function's module is imported, and exceptions of the import are passed on.

    Raises:
        ConfigError: No reward has this name. The message lists the rewards.
    """
    problem = problem_with(name)
    if problem is not None:
        raise ConfigError(problem)
    if name not in _registered:
        return imported("data.reward", name)
    if name in _loads:
        importlib.import_module(_loads[name])
    return _registered[name]


def checked(function: Reward, request: RewardRequest) -> RewardResult:
    """Call the reward, check that all its numbers are finite, and return its result.

    Raises:
        RewardError: The reward raised, or returned another type or a number that is not finite.
        MemoryError: The reward ran out of memory.
    """
    where = f"prompt {request.prompt.id}"
    try:
        result: Any = function(request.prompt, request.response, request.finish_reason)
    except (MemoryError, RewardError):
        raise
    except (Exception, SystemExit) as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"{where}: the reward raised {described(error)}") from error
    if not isinstance(result, RewardResult):
        found = type(cast(object, result)).__name__
        raise RewardError(f"{where}: found a {found}; expected a RewardResult. Correct the reward.")
    try:
        value, info = _number(result.value), {str(key): _number(number) for key, number in result.info.items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        expected = "expected a number, and numbers by name in `info`. Correct the reward."
        raise RewardError(f"{where}: found a RewardResult with {described(error)}; {expected}") from error
    wrong = {key: number for key, number in {**info, "value": value}.items() if not math.isfinite(number)}
    if wrong:
        raise RewardError(f"{where}: found {wrong}; expected finite numbers. Correct the reward.")
    return RewardResult(value, info)


def _number(value: Any) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {type(value).__name__} for a number")
    return float(value)
