"""Defines the interface between training and any engine that samples responses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_dppo.environments import Episode
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.types import FinishReason, Prompt, RolloutTopK, RoutedExperts, WeightVersionSpan


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, the same for every request of one call."""

    max_response_tokens: int
    temperature: float = 1.0  # 0 decodes greedily
    top_p: float = 1.0
    num_topk_log_probs: int = 0  # K of RolloutTopK; 0 leaves it out
    capture_routes: bool = False
    max_turn_tokens: int | None = None  # of one request; none: as many as max_response_tokens leaves


@dataclass(frozen=True)
class Completion:
    """One sampled response, in the order of its request."""

    request_id: str
    tokens: Tensor  # [R] int64, end-of-sequence included
    log_probs: Tensor  # [R] float32, of the sampling distribution
    finish_reason: FinishReason
    topk: RolloutTopK | None
    routed_experts: RoutedExperts | None  # rows for prompt and response, the last token left out
    weight_versions: tuple[WeightVersionSpan, ...]
    num_moves: int = 0  # times that it was asked of another server, since one had failed
    num_retractions: int = 0  # times that the engine dropped its cache and computed it, with its routes, again
    num_cached_tokens: int = 0  # of the inputs of its requests, those that the engine did not compute again
    routes_fault: str | None = None  # why routes that were asked for are absent
    loss_mask: Tensor | None = None  # [R] bool: the tokens that were sampled; none: all of them
    episode: Episode | None = None  # what its environment made of it; none where there is none


@dataclass(frozen=True)
class Request:
    """Asks for one response to a prompt."""

    id: str
    prompt_tokens: tuple[int, ...]
    noise_key: tuple[int, int, int]  # (seed, rollout, sample); with the position it fixes the sampling noise
    partial: Completion | None = None  # what there is of it already: sampling goes on behind these tokens
    # For environments; engines do not read it:
    prompt: Prompt | None = None  # what the conversation is about
    is_chat: bool = False  # whether it opens with messages; what follows are messages then


IsEnough = Callable[[Completion], bool]
"""Told of each response that is there, or given up; whether sampling may end."""


class RolloutEngine(Protocol):
    """Samples responses with weights pushed to it in Hugging Face names.

    Ownership: the engine owns its copy of the weights; `load_weights` copies and keeps no reference.
    """

    @property
    def weight_version(self) -> int:
        """Version given with the last complete `load_weights`; -1 before the first."""
        ...

    @property
    def counts(self) -> EngineCounts:
        """Counts of retries, time-outs and tokens since the engine was built, over all calls of `generate`."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one response per request.

        Raises:
            RolloutError: A prompt does not fit, or the engine cannot give what `params` asks for.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace all weights, and return a checksum of what was received.

        Args:
            weights: Hugging Face checkpoint names (one name per expert) and full tensors.
            version: The version that samples report from now on.

        Returns:
            `rollout.checksum.WeightChecksum` over the names and tensors received, in order.

        Raises:
            WeightSyncError: A tensor of the model is missing, arrives twice, is unknown, or has another shape.
        """
        ...


class InterruptibleEngine(RolloutEngine, Protocol):
    """An engine that can abort responses, and resume them in a later call."""

    def generate_until(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough
    ) -> list[Completion]:
        """Sample until `is_enough` says so; return the other responses aborted, with their tokens so far.

        Raises:
            RolloutError: As `generate` does.
        """
        ...
