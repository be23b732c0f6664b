"""The interface between training and any engine that samples responses, and the records that pass through it.

A response may be sampled in parts: it was aborted, or it is at an environment's next turn. The engine computes
prompt and old tokens again, by the weights that it holds now. What is old stays as it was sampled: its
log-probs, its top-K and its routes. Only the last old token has no routes yet, since a token's routes come with
its forward, and neither has an observation that came behind it: they are the first rows that are asked of the
engine.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.environments import Episode
from megatron_dppo.errors import RolloutError
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

HasEnded = Callable[[Completion], Awaitable[None]]
"""Told of each completion as soon as it is there, aborted ones included."""


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
            `engines.checksum.WeightChecksum` over the names and tensors received, in order.

        Raises:
            WeightSyncError: A tensor of the model is missing, arrives twice, is unknown, or has another shape.
        """
        ...


class Session(Protocol):
    """Samples responses one by one, in one event loop, by weights of one version."""

    async def ask(self, request: Request, params: SamplingParams) -> Completion:
        """Sample one response; at any time, and while others are being sampled.

        Returns:
            The response. `aborted(request)` where it was given up, with an entry in `errors`; after a hold,
            what there is of it, with finish_reason "abort".

        Raises:
            RolloutError: The prompt does not fit, the engine cannot give what `params` asks for, it cannot
                sample any more, or a request of this id is being sampled.
        """
        ...

    async def hold(self) -> None:
        """Abort what is in flight; when it returns the engine samples nothing more for this session.

        It raises nothing, and ends within a time that the engine states, answered or not. Every `ask` then
        returns, and later ones return `aborted(request)` at once.
        """
        ...

    @property
    def is_held(self) -> bool:
        """Whether `hold` was called."""
        ...

    @property
    def errors(self) -> Mapping[str, RolloutError]:
        """Why requests were given up, by their ids; one that a hold interrupted has no entry."""
        ...


@runtime_checkable
class ConcurrentEngine(RolloutEngine, Protocol):
    """An engine whose responses can be asked for one by one, at any time."""

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[Session]:
        """Open a session with the weights that the engine holds now; leaving it ends what is in flight.

        Sessions may be open in several threads at once. Their counts are added to `counts` when they are left.

        Args:
            may_be_held: Whether `hold` may be called: responses must then fit as prompts, to be resumed.

        Raises:
            RolloutError: The engine cannot sample.
        """
        ...


@runtime_checkable
class TrajectoryEngine(RolloutEngine, Protocol):
    """An engine that says when each response ends, while it samples the others, where they end one by one."""

    def generate_each(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        ended: HasEnded,
        is_enough: IsEnough | None = None,
    ) -> list[Completion]:
        """Sample as `generate` does, or until `is_enough` says so.

        Args:
            requests: See `RolloutEngine.generate`.
            params: How to sample.
            ended: Awaited with each completion as soon as it is there; the call returns when all have returned.
                An engine that samples batches does not call it.
            is_enough: Told first; once it returns True the other responses are aborted. None: all are
                sampled to their ends.

        Returns:
            A completion for each request, in order; aborted ones with their tokens so far.

        Raises:
            RolloutError: As `generate` does, and what `ended` raises.
        """
        ...


class EngineWrapper:
    """Base of an engine that samples with another one, whose weights and counts are its own."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @property
    def weight_version(self) -> int:
        """See `RolloutEngine.weight_version`."""
        return self._engine.weight_version

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        return self._engine.counts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See `RolloutEngine.load_weights`."""
        return self._engine.load_weights(weights, version)


def input_tokens(request: Request) -> list[int]:
    """Return the prompt and the response tokens sampled before, which the next call forwards."""
    return [*request.prompt_tokens, *(request.partial.tokens.tolist() if request.partial else ())]


def num_tokens_before(request: Request) -> int:
    """Return the number of response tokens that a request continues."""
    return request.partial.tokens.numel() if request.partial else 0


def num_tokens_left(request: Request, params: SamplingParams) -> int:
    """Return the number of response tokens that may still be sampled for this request."""
    left = params.max_response_tokens - num_tokens_before(request)
    return left if params.max_turn_tokens is None else min(left, params.max_turn_tokens)


def resumed(
    request: Request, completion: Completion, params: SamplingParams
) -> tuple[Request, SamplingParams] | None:
    """Return the request for the rest of a turn that was interrupted; none where no token is left to it.

    `params.max_turn_tokens` bounds the whole turn: what was sampled of it is taken off. The answer to the
    rest is the whole turn, and may be resumed in the same way.

    Args:
        request: Asked for the turn, or for the rest of it.
        completion: What there is of its answer; it begins with `request.partial`.
        params: Those that `request` was asked with.
    """
    num_new = completion.tokens.numel() - num_tokens_before(request)
    if num_new == 0:
        return request, params
    if params.max_turn_tokens is not None:
        params = dataclasses.replace(params, max_turn_tokens=params.max_turn_tokens - num_new)
    request = dataclasses.replace(request, partial=completion)
    return (request, params) if num_tokens_left(request, params) > 0 else None


def first_route_row(request: Request) -> int:
    """Return the index of the first token whose routes are still missing."""
    if request.partial is None:
        return 0
    routes = request.partial.routed_experts
    return len(input_tokens(request)) - 1 if routes is None else routes.indices.shape[0]


def aborted(request: Request) -> Completion:
    """Return the completion of an unanswered request: the tokens sampled before, or none."""
    if request.partial is not None:
        return request.partial
    nothing = torch.zeros(0)
    return Completion(request.id, nothing.long(), nothing, "abort", None, None, ())


def with_observation(completion: Completion, tokens: Tensor) -> Completion:
    """Append an environment's observation `[N]` int64 to a completion, for the request of the next turn.

    Observations do not learn: their `loss_mask` is False, their log-probs are zeros that nobody reads, and
    their top-K is padding. Their routes come with the next turn.
    """
    topk, nothing = completion.topk, torch.zeros(tokens.numel())
    if topk is not None:
        num_columns = topk.ids.shape[1]
        padding = topk.ids.new_full((tokens.numel(), num_columns), -1)
        improbable = topk.log_probs.new_full(padding.shape, -torch.inf)
        topk = RolloutTopK(torch.cat([topk.ids, padding]), torch.cat([topk.log_probs, improbable]))
    return dataclasses.replace(
        completion,
        tokens=torch.cat([completion.tokens, tokens]),
        log_probs=torch.cat([completion.log_probs, nothing]),
        loss_mask=torch.cat([mask_of(completion), nothing.bool()]),
        topk=topk,
        finish_reason="abort",
    )


def joined(partial: Completion, rest: Completion) -> Completion:
    """Join the tokens sampled before with those of `rest` into one completion; it ends as `rest` does.

    Top-K and routes that either of them lacks are left out of the whole. The routes of `rest` begin with the
    first row that `partial` lacks. Moves, retractions and cached tokens are those of both: a response that was
    retracted once stays so, however often it is resumed.
    """
    topk = routes = None
    if partial.topk is not None and rest.topk is not None:
        topk = RolloutTopK(
            torch.cat([partial.topk.ids, rest.topk.ids]),
            torch.cat([partial.topk.log_probs, rest.topk.log_probs]),
        )
    if partial.routed_experts is not None and rest.routed_experts is not None:
        indices = torch.cat([partial.routed_experts.indices, rest.routed_experts.indices])
        routes = dataclasses.replace(rest.routed_experts, indices=indices)
    return dataclasses.replace(
        rest,
        tokens=torch.cat([partial.tokens, rest.tokens]),
        log_probs=torch.cat([partial.log_probs, rest.log_probs]),
        topk=topk,
        routed_experts=routes,
        weight_versions=_joined_spans(partial, rest),
        num_moves=partial.num_moves + rest.num_moves,
        num_retractions=partial.num_retractions + rest.num_retractions,
        num_cached_tokens=partial.num_cached_tokens + rest.num_cached_tokens,
        loss_mask=None if partial.loss_mask is None else torch.cat([partial.loss_mask, mask_of(rest)]),
    )


def mask_of(completion: Completion) -> Tensor:
    """Return the mask of a completion's sampled tokens, `[R]` bool."""
    if completion.loss_mask is not None:
        return completion.loss_mask
    return torch.ones(completion.tokens.numel(), dtype=torch.bool)


def _joined_spans(partial: Completion, rest: Completion) -> tuple[WeightVersionSpan, ...]:
    offset, spans = partial.tokens.numel(), list(partial.weight_versions)
    for span in rest.weight_versions:
        start, stop = span.start + offset, span.stop + offset
        if spans and (spans[-1].version, spans[-1].stop) == (span.version, start):
            start = spans.pop().start
        spans.append(WeightVersionSpan(start, stop, span.version))
    return tuple(spans)
