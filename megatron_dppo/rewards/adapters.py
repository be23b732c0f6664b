"""Rewards of other signatures: of whole groups, and verl's and slime's functions, unchanged.

A config names the signature by a prefix before the function's path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from megatron_dppo.rewards.base import BatchFunction, Reward, RewardRequest, adapter, batch_adapter
from megatron_dppo.types import FinishReason, Message, Prompt


@adapter("verl:")
def verl_reward(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    It may return a number, or a dict with the number "score"; the dict's other numbers are reported as
    metrics. `ground_truth` has the type of the file's cell, and `extra_info` is the prompt's metadata. A
    coroutine function is awaited.
    """

    def score(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
        return function(
            data_source=prompt.source,
            solution_str=response,
            ground_truth=prompt.typed_answer,
            extra_info=dict(prompt.metadata or {}),
        )

    return score


@batch_adapter("verl-batch:")
def verl_batch_reward(function: Callable[..., Any]) -> BatchFunction:
    """Return a reward that calls a function of verl's reward manager "batch" with the responses to a prompt.

    Its arguments are lists: `data_sources`, `solution_strs`, `ground_truths`, `extra_infos`. It returns a list
    with a number, or a dict with the number "score", for each response.
    """

    def score(requests: Sequence[RewardRequest]) -> Any:
        prompts = [request.prompt for request in requests]
        return function(
            data_sources=[prompt.source for prompt in prompts],
            solution_strs=[request.response for request in requests],
            ground_truths=[prompt.typed_answer for prompt in prompts],
            extra_infos=[dict(prompt.metadata or {}) for prompt in prompts],
        )

    return score


@adapter("slime:")
def slime_reward(function: Callable[..., Any]) -> Reward:
    """Return a reward that calls slime's custom reward `async def rm(args, sample, **kwargs)`.

    `sample` is a `SlimeSample`. `args` has none of slime's options.
    """

    def score(prompt: Prompt, response: str, finish_reason: FinishReason) -> Any:
        return function(SimpleNamespace(), _slime_sample(RewardRequest(prompt, response, finish_reason)))

    return score


@batch_adapter("slime-batch:")
def slime_batch_reward(function: Callable[..., Any]) -> BatchFunction:
    """Return a reward that calls slime's custom reward of groups: `async def rm(args, samples, **kwargs)`."""

    def score(requests: Sequence[RewardRequest]) -> Any:
        return function(SimpleNamespace(), [_slime_sample(request) for request in requests])

    return score


@batch_adapter("batch:")
def group_reward(function: Callable[..., Any]) -> BatchFunction:
    """Return a reward that calls your own function of three lists: prompts, responses, finish reasons."""

    def score(requests: Sequence[RewardRequest]) -> Any:
        prompts, responses = [each.prompt for each in requests], [each.response for each in requests]
        return function(prompts, responses, [each.finish_reason for each in requests])

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
    label: Any
    status: Status
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None


def _slime_sample(request: RewardRequest) -> SlimeSample:
    prompt, is_whole = request.prompt, request.finish_reason == "stop"
    status = SlimeSample.Status.COMPLETED if is_whole else SlimeSample.Status.TRUNCATED
    asked = prompt.text or list(prompt.messages or ())
    return SlimeSample(asked, request.response, prompt.typed_answer, status, dict(prompt.metadata or {}))
