"""Rewards of other projects, unchanged: verl's `compute_score` and slime's custom reward."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, SupportsFloat, cast

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import Reward, RewardResult, adapter
from megatron_dppo.types import FinishReason, Message, Prompt


@adapter("verl:")
def verl_reward(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It may return a number, or a dict with the number "score"; the dict's other numbers are reported as
    metrics. `extra_info` is the prompt's metadata. A coroutine function is awaited.
    """

    def score(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
        found = function(
            data_source=prompt.source,
            solution_str=response,
            ground_truth=prompt.answer,
            extra_info=dict(prompt.metadata or {}),
        )
        return _then(found, _of_dict)

    return score


@adapter("slime:")
def slime_reward(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls slime's custom reward `async def rm(args, sample, **kwargs)`.

    `sample` is a `SlimeSample`. `args` has none of slime's options.
    """

    def score(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
        status = SlimeSample.Status.COMPLETED if finish_reason == "stop" else SlimeSample.Status.TRUNCATED
        messages = list(prompt.messages or ())
        sample = SlimeSample(
            prompt.text or messages, response, prompt.answer, status, dict(prompt.metadata or {})
        )
        return _then(function(SimpleNamespace(), sample), _of_dict)

    return score


@dataclass
class SlimeSample:
    """What a reward sees of slime's `Sample`."""

    class Status(Enum):
        """How the response ended."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str | list[Message]
    response: str
    label: str
    status: Status
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None


def _then(found: Any, change: Callable[[Any], Any]) -> Any:
    """Return what `change` makes of a result, or of the result that a coroutine will have."""
    if not inspect.isawaitable(found):
        return change(found)

    async def awaited(result: Awaitable[Any]) -> Any:
        return change(await result)

    return awaited(found)


def _of_dict(found: Any) -> Any:
    """Return the number of a result, and the further numbers of a dict."""
    if not isinstance(found, Mapping):
        return found
    fields = cast(Mapping[str, Any], found)
    if "score" not in fields:
        expected = "expected a number, or a dict with the number 'score'. Correct the reward."
        raise RewardError(f"found a dict with {sorted(map(str, fields))}; {expected}")
    further = {str(name): value for name, value in fields.items() if name != "score"}
    info = {name: float(value) for name, value in further.items() if isinstance(value, SupportsFloat)}
    return RewardResult(fields["score"], info)
