"""The reward that a config chooses: one or a weighted sum, the values of right and wrong, thinking, retries."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from megatron_dppo.errors import Problem, RewardError
from megatron_dppo.rewards.base import (
    ENVIRONMENT,
    REWARDS,
    Reward,
    RewardRequest,
    RewardResult,
    batch_reward,
    call_batch,
    call_reward,
    problem_with,
    reward,
    scores_groups,
)
from megatron_dppo.types import FinishReason, Prompt

_FIRST_PAUSE_S = 0.1  # before the first retry; each further pause is twice as long
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
    def scores_groups(self) -> bool:
        """Whether some reward gets all responses to a prompt at once."""
        return any(map(scores_groups, self.weights))

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
    """Return the reward of a choice that scores single responses. Imports a user's modules.

    Exceptions of the import are passed on.
    """
    if isinstance(choice.reward, str):
        return _under_rules(choice.reward, choice)
    parts = {_label(name): (weight, _under_rules(name, choice)) for name, weight in choice.reward.items()}

    def weighted_sum(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Return the weighted sum. Info has each part's value by its name, and its info as `part/key`."""
        request = RewardRequest(prompt, response, finish_reason)
        return _total({label: (weight, call_reward(part, request)) for label, (weight, part) in parts.items()})

    return weighted_sum


Scores = list[RewardResult | RewardError]
"""A result for each response, or its score's error."""


def build_scorer(choice: RewardChoice) -> Callable[[Sequence[RewardRequest]], Scores]:
    """Return the function that scores responses of one prompt with any choice; see `build_reward`.

    It raises a RewardError, for all responses, if a reward of whole groups does.
    """
    if not choice.scores_groups:
        return _one_by_one(build_reward(choice))
    parts = {name: _group_scorer(name, choice) for name in choice.weights}
    if isinstance(choice.reward, str):
        return parts[choice.reward]

    def weighted_sum(requests: Sequence[RewardRequest]) -> Scores:
        scores = {name: part(requests) for name, part in parts.items()}
        totals: Scores = []
        for number in range(len(requests)):
            found = {name: each[number] for name, each in scores.items()}
            error = next((each for each in found.values() if isinstance(each, RewardError)), None)
            results = {name: each for name, each in found.items() if isinstance(each, RewardResult)}
            parted = {_label(name): (choice.weights[name], result) for name, result in results.items()}
            totals.append(_total(parted) if error is None else error)
        return totals

    return weighted_sum


def _total(parts: Mapping[str, tuple[float, RewardResult]]) -> RewardResult:
    """Return the weighted sum of parts by label."""
    value = math.fsum(weight * result.value for weight, result in parts.values())
    info = {label: result.value for label, (_, result) in parts.items()}
    for label, (_, result) in parts.items():
        info |= {f"{label}/{key}": number for key, number in result.info.items()}
    return RewardResult(value, info)


def _group_scorer(name: str, choice: RewardChoice) -> Callable[[Sequence[RewardRequest]], Scores]:
    if not scores_groups(name):
        return _one_by_one(_under_rules(name, choice))
    function = batch_reward(name)

    def score(requests: Sequence[RewardRequest]) -> Scores:
        scores, num_retries = _retry(lambda: call_batch(function, requests), choice.retries)
        if not choice.retries:
            return scores
        return [_noted(each, num_retries) if isinstance(each, RewardResult) else each for each in scores]

    return score


def _one_by_one(function: Reward) -> Callable[[Sequence[RewardRequest]], Scores]:
    def score(requests: Sequence[RewardRequest]) -> Scores:
        scores: Scores = []
        for request in requests:
            try:
                scores.append(call_reward(function, request))
            except RewardError as error:
                scores.append(error)
        return scores

    return score


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
    """Return a reward that calls a function which raised again, see `_retry`."""

    def retried(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        """Score a response. Info has `num_retries`."""
        request = RewardRequest(prompt, response, finish_reason)
        return _noted(*_retry(lambda: call_reward(function, request), retries))

    return retried


T = TypeVar("T")


def _retry(call: Callable[[], T], retries: int) -> tuple[T, int]:
    """Call a function that raised again, after pauses that double; return the number of retries too.

    A `RewardError` of the function is about the prompt, and a result of a wrong type stays wrong: neither is
    tried again.
    """
    for attempt in range(retries):
        try:
            return call(), attempt
        except RewardError as error:
            if error.__cause__ is None:
                raise
        time.sleep(_FIRST_PAUSE_S * 2**attempt)
    return call(), retries


def _noted(result: RewardResult, num_retries: int) -> RewardResult:
    return RewardResult(result.value, {**result.info, "num_retries": float(num_retries)})
