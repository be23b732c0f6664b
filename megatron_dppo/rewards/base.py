"""The interface of rewards, their registry, and the reward that a config chooses.

A config chooses one reward or a weighted sum, the values of right and wrong, and what happens to thinking.
"""

import asyncio
import importlib
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Protocol, SupportsFloat, TypeVar, cast

from megatron_dppo.errors import ConfigError, Problem, RewardError
from megatron_dppo.runtime.user_code import describe_error, import_named, problem_with_path
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

    It must be a pure function: the same rollout scored again, on another rank or after a
    resume, gives the same values. If it raises, or if the value is not finite, `rollout.scoring` drops and
    counts the sample.
    """

    def __call__(self, prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score a response. A user's function may also return a number, or be a coroutine function.

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
_adapters: dict[str, Callable[[Callable[..., Any]], Reward]] = {}
_FIRST_PAUSE_S = 0.1  # before the first retry; each further pause is twice as long
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
        reads: Answer form that the reward understands. Prompts that request another form do not fit.

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


def adapter(prefix: str) -> Callable[[Callable[[Callable[..., Any]], Reward]], Callable[..., Reward]]:
    """Decorate a function from another project's reward to ours; configs write `prefix` before the path."""

    def add(function: Callable[[Callable[..., Any]], Reward]) -> Callable[..., Reward]:
        _adapters[prefix] = function
        return function

    return add


def answer_form(name: str) -> AnswerForm | None:
    """Return the answer form that a registered reward reads. `None` means any form, or not registered."""
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
    return problem_with_path("data.reward", _without_prefix(name)[1], _PATH, sorted(_registered))


def _without_prefix(name: str) -> tuple[str, str]:
    """Return the adapter's prefix, or "", and the rest of a reward's name."""
    prefix = next((prefix for prefix in _adapters if name.startswith(prefix)), "")
    return prefix, name.removeprefix(prefix)


def reward(name: str) -> Reward:
    """Return the reward registered under `name`, or the function named by "package.module:function".

    With "verl:" or "slime:" before the path, the function has the signature of that project. The function's
    module is imported, and exceptions of the import are passed on.

    Raises:
        ConfigError: No reward has this name. The message lists the rewards.
    """
    problem = problem_with(name)
    if problem is not None:
        raise ConfigError(problem)
    if name not in _registered:
        prefix, path = _without_prefix(name)
        function = import_named("data.reward", path)
        return _adapters[prefix](function) if prefix else function
    if name in _loads:
        importlib.import_module(_loads[name])
    return _registered[name]


def call_reward(function: Callable[[Prompt, str, FinishReason], Any], request: RewardRequest) -> RewardResult:
    """Call the reward, check that all its numbers are finite, and return its result.

    Raises:
        RewardError: The reward raised, or returned another type or a number that is not finite.
        MemoryError: The reward ran out of memory.
    """
    where = f"prompt {request.prompt.id}"
    try:
        result: Any = function(request.prompt, request.response, request.finish_reason)
        if inspect.isawaitable(result):
            result = _runner().run(_awaited(result))
    except MemoryError:
        raise
    except RewardError as error:
        raise error if str(error).startswith(where) else RewardError(f"{where}: {error}") from error.__cause__
    except (Exception, SystemExit) as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"{where}: the reward raised {describe_error(error)}") from error
    if isinstance(result, SupportsFloat):
        result = RewardResult(cast(Any, result))
    if not isinstance(result, RewardResult):
        found = type(cast(object, result)).__name__
        raise RewardError(f"{where}: found a {found}; expected a number or a RewardResult. Correct the reward.")
    try:
        value, info = _number(result.value), {str(key): _number(number) for key, number in result.info.items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        expected = "expected a number, and numbers by name in `info`. Correct the reward."
        raise RewardError(f"{where}: found a RewardResult with {describe_error(error)}; {expected}") from error
    wrong = {key: number for key, number in {**info, "value": value}.items() if not math.isfinite(number)}
    if wrong:
        raise RewardError(f"{where}: found {wrong}; expected finite numbers. Correct the reward.")
    return RewardResult(value, info)


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of this process, so that a reward can keep its connections."""
    return asyncio.Runner()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _number(value: Any) -> float:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {type(value).__name__} for a number")
    return float(value)


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
        retries: Number of further calls of a user's function that raised.
    """

    reward: str | Mapping[str, float]
    values: tuple[float, float] = (0.0, 1.0)
    thinking: Thinking = "ignore"
    retries: int = 0

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
        fields = {"reward": reward, "values": self.values, "thinking": self.thinking}
        return json.dumps(fields | ({"retries": self.retries} if self.retries else {}))

    @classmethod
    def read(cls, text: str) -> "RewardChoice":
        """Return the choice that a worker's argument `text` encodes."""
        if not text.startswith("{"):
            return cls(text)
        fields = json.loads(text)
        return cls(fields["reward"], tuple(fields["values"]), fields["thinking"], fields.get("retries", 0))


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


def build_reward(choice: RewardChoice) -> Reward:
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
        results = {label: call_reward(part, request) for label, (_, part) in parts.items()}
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
    if name not in REWARDS:
        return _with_retries(function, choice.retries) if choice.retries else function
    if (choice.values, choice.thinking) == (RewardChoice.values, RewardChoice.thinking):
        return function
    wrong, right = choice.values

    def under_rules(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score with the values of right and wrong. Info has `ends_thinking` if thinking is required."""
        info: dict[str, float] = {}
        if choice.thinking == "require":
            rest = after_thinking(response)
            info["ends_thinking"] = float(rest is not None)
            response = rest or ""
        result = call_reward(function, RewardRequest(prompt, response, finish_reason))
        value = (1.0 - result.value) * wrong + result.value * right
        return RewardResult(value, {**result.info, **info})

    return under_rules


def _with_retries(function: Reward, retries: int) -> Reward:
    """Return a reward that calls a function which raised again, after pauses that double.

    A `RewardError` of the function is about the prompt, and a result of a wrong type stays wrong: neither is
    tried again.
    """

    def retried(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score a response. Info has `num_retries`."""
        request = RewardRequest(prompt, response, finish_reason)
        for attempt in range(retries):
            try:
                return _noted(call_reward(function, request), attempt)
            except RewardError as error:
                if error.__cause__ is None:
                    raise
            time.sleep(_FIRST_PAUSE_S * 2**attempt)
        return _noted(call_reward(function, request), retries)

    return retried


def _noted(result: RewardResult, num_retries: int) -> RewardResult:
    return RewardResult(result.value, {**result.info, "num_retries": float(num_retries)})
