"""Whether a sample can be trained on, and its reward; what cannot be used gets a reason, never a repair."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from megatron_dppo.errors import RewardError, RoutingReplayError
from megatron_dppo.rewards.base import Reward, RewardResult
from megatron_dppo.rollout.counts import DropReason
from megatron_dppo.types import FinishReason, Prompt, Sample

RouteValidator = Callable[[Sample], None]
"""Raises RoutingReplayError where a sample's captured routes do not fit."""


class Tokenizer(Protocol):
    """What rollout needs of a transformers tokenizer, whose own annotations are unions of all it can return."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Token ids of a text prompt, a list of int."""
        ...

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> Any:
        """Token ids of a chat prompt, a list of int."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Text of a list of token ids."""
        ...


@dataclass(frozen=True)
class Fault:
    """Why a sample was dropped."""

    reason: DropReason
    sample_id: str
    found: str

    def __str__(self) -> str:
        return f"{self.reason}, sample {self.sample_id}: {self.found}"


@dataclass(frozen=True)
class Judge:
    """Scores a sample, or says why it cannot be trained on."""

    tokenizer: Tokenizer
    reward: Reward
    needs_routes: bool
    validate_routes: RouteValidator | None

    def __call__(self, prompt: Prompt, sample: Sample) -> Sample | Fault:
        """The sample with its reward, or the first fault found."""
        fault = self._fault(sample)
        if fault is not None:
            return fault
        response = as_text(self.tokenizer, sample.tokens[sample.prompt_length :], has_special_tokens=False)
        try:
            result = score(self.reward, prompt, response, sample.finish_reason)
        except RewardError as error:
            return Fault("reward_failed", sample.id, str(error))
        return dataclasses.replace(sample, reward=float(result.value), reward_info=dict(result.info))

    def _fault(self, sample: Sample) -> Fault | None:
        if sample.finish_reason == "abort":
            return Fault("aborted", sample.id, f"the engine gave up after {sample.response_length} tokens")
        if sample.response_length == 0:
            return Fault("empty_response", sample.id, f"finish_reason {sample.finish_reason!r}")
        if not _has_usable_log_probs(sample):
            return Fault("non_finite_log_probs", sample.id, "NaN or infinity among the rollout's log-probs")
        if self.needs_routes and sample.routed_experts is None:
            return Fault("invalid_routes", sample.id, "routes were asked for and none came back")
        try:
            if self.validate_routes is not None:
                self.validate_routes(sample)
        except RoutingReplayError as error:
            return Fault("invalid_routes", sample.id, str(error))
        return None


def as_text(tokenizer: Tokenizer, tokens: Tensor, *, has_special_tokens: bool) -> str:
    """Token ids [N] as text, with or without the special tokens among them; nothing else is tidied."""
    ids = cast(list[int], tokens.tolist())  # pyright: ignore[reportUnknownMemberType]
    return tokenizer.decode(ids, skip_special_tokens=not has_special_tokens, clean_up_tokenization_spaces=False)


def score(reward: Reward, prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """What the reward says, checked.

    Raises:
        RewardError: The reward raised, returned something else, or a number that is not finite.
    """
    try:
        result = reward(prompt, response, finish_reason)
        values = {"value": float(result.value), **result.info}
        wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    except Exception as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"prompt {prompt.id}: the reward raised {type(error).__name__}: {error}") from error
    if wrong:
        raise RewardError(f"prompt {prompt.id}: found {wrong}; expected finite numbers. Correct the reward.")
    return result


def _has_usable_log_probs(sample: Sample) -> bool:
    """Sampled tokens need finite log-probs; among the top-K, -inf pads and contributes nothing."""
    is_finite = bool(sample.rollout_log_probs.isfinite().all())
    return is_finite and (sample.topk is None or bool((sample.topk.log_probs < math.inf).all()))
