"""The interface of rewards, their registry, and the calls of a user's functions."""

import asyncio
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
        """Score a response. A user's function may also return a number or a dict, or be a coroutine function.

        Args:
            prompt: Prompt of the response. `prompt.answer` is the reference.
            response: Text of the response, without special tokens such as end-of-sequence.
            finish_reason: "stop" if the model ended the response itself.
        """
        ...


BatchFunction = Callable[[Sequence[RewardRequest]], Any]
"""Returns a score for each of a prompt's responses, or a coroutine that will; `call_batch` calls it."""

_AnyReward = TypeVar("_AnyReward", bound=Reward)
_registered: dict[str, Reward] = {}
_loads: dict[str, str] = {}
_reads: dict[str, AnswerForm] = {}
_PATH = "package.module:function"
_adapters: dict[str, Callable[[Callable[..., Any]], Reward]] = {}
_batch_adapters: dict[str, Callable[[Callable[..., Any]], BatchFunction]] = {}
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


def batch_adapter(
    prefix: str,
) -> Callable[[Callable[[Callable[..., Any]], BatchFunction]], Callable[..., BatchFunction]]:
    """Decorate a function from a reward of whole groups to a `BatchFunction`; `prefix` as in `adapter`."""

    def add(function: Callable[[Callable[..., Any]], BatchFunction]) -> Callable[..., BatchFunction]:
        _batch_adapters[prefix] = function
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
    prefixes = (prefix for prefix in (*_adapters, *_batch_adapters) if name.startswith(prefix))
    prefix = next((prefix for prefix in prefixes if ":" in name.removeprefix(prefix)), "")
    return prefix, name.removeprefix(prefix)


def scores_groups(name: str) -> bool:
    """Whether a reward gets all responses to a prompt at once."""
    return _without_prefix(name)[0] in _batch_adapters


def reward(name: str) -> Reward:
    """Return the reward registered under `name`, or the function named by "package.module:function".

    With "verl:" or "slime:" before the path, the function has the signature of that project. The function's
    module is imported, and exceptions of the import are passed on.

    Raises:
        ConfigError: No reward has this name. The message lists the rewards.
    """
    if name in _registered:
        if name in _loads:
            importlib.import_module(_loads[name])
        return _registered[name]
    prefix, function = _import(name)
    return _adapters[prefix](function) if prefix else function


def batch_reward(name: str) -> BatchFunction:
    """Return the reward of whole groups that "batch:package.module:function" names; see `reward`."""
    prefix, function = _import(name)
    return _batch_adapters[prefix](function)


def _import(name: str) -> tuple[str, Callable[..., Any]]:
    """Import the function that a name means; return the adapter's prefix too."""
    problem = problem_with(name)
    if problem is not None:
        raise ConfigError(problem)
    prefix, path = _without_prefix(name)
    return prefix, import_named("data.reward", path)


def call_reward(function: Callable[[Prompt, str, FinishReason], Any], request: RewardRequest) -> RewardResult:
    """Call the reward, check that all its numbers are finite, and return its result.

    Raises:
        RewardError: The reward raised, or returned another type or a number that is not finite.
        MemoryError: The reward ran out of memory.
    """
    where, label = f"prompt {request.prompt.id}", request.prompt.label
    if isinstance(label, bool | list | dict) and function in _registered.values():
        action = "Name a function of your own as the reward, such as verl:package.module:compute_score."
        raise RewardError(f"{where}: found the answer {label!r}; expected a text or a number. {action}")
    return _result(where, _call(where, function, request.prompt, request.response, request.finish_reason))


def call_batch(function: BatchFunction, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardError]:
    """Call a reward of whole groups; return a result for each response, or its score's error."""
    count = len(requests)
    where = f"prompt {requests[0].prompt.id}, a group of {count}"
    found: Any = _call(where, function, requests)
    is_list = isinstance(found, Iterable) and not isinstance(found, str | Mapping)
    scores = list(cast(Iterable[Any], found)) if is_list else None  # an array's elements, too
    if scores is None or len(scores) != count:
        what = f"a {type(cast(object, found)).__name__}" if scores is None else f"{len(scores)} scores"
        raise RewardError(f"{where}: found {what}; expected a list of {count} scores. Correct the reward.")
    results: list[RewardResult | RewardError] = []
    for number, (request, score) in enumerate(zip(requests, scores, strict=True), start=1):
        try:
            results.append(_result(f"prompt {request.prompt.id}, response {number} of {count}", score))
        except RewardError as error:
            results.append(error)
    return results


def _call(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code, and wait for the result if it is a coroutine."""
    try:
        result: Any = function(*arguments)
        return _runner().run(_awaited(result)) if inspect.isawaitable(result) else result
    except MemoryError:
        raise
    except RewardError as error:
        raise error if str(error).startswith(where) else RewardError(f"{where}: {error}") from error.__cause__
    except (Exception, SystemExit) as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"{where}: the reward raised {describe_error(error)}") from error


def _result(where: str, result: Any) -> RewardResult:
    """Return a score as a `RewardResult` with finite numbers."""
    if isinstance(result, SupportsFloat):
        result = RewardResult(cast(Any, result))
    elif isinstance(result, Mapping):
        result = _of_dict(where, cast(Mapping[str, Any], result))
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


def _of_dict(where: str, fields: Mapping[str, Any]) -> RewardResult:
    """Return a dict's "score" as the value, and its other numbers as info."""
    if "score" not in fields:
        expected = "expected a number, or a dict with the number 'score'. Correct the reward."
        raise RewardError(f"{where}: found a dict with {sorted(map(str, fields))}; {expected}")
    further = {str(name): value for name, value in fields.items() if name != "score"}
    info = {name: float(value) for name, value in further.items() if isinstance(value, SupportsFloat)}
    return RewardResult(fields["score"], info)


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
