"""The interface between training and any engine that samples responses, and the records that pass through it.

A response may be sampled in parts, because it was aborted or because an environment added its next turn. The
engine then forwards the prompt and the old tokens again, with its current weights. The old tokens keep their
log-probs, top-K and routes. A token's routes come from its own forward, so the last old token and an
observation after it have no routes yet. They are the first rows that the next request captures.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import asdict, astuple, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_dppo.engines.growth import TokenIds, cut, joined
from megatron_dppo.errors import RolloutError
from megatron_dppo.types import (
    FinishReason,
    Message,
    Prompt,
    RolloutTopK,
    RoutedExperts,
    Sample,
    WeightVersionSpan,
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, the same for every request of one call."""

    max_response_tokens: int
    temperature: float = 1.0  # 0 decodes greedily
    top_p: float = 1.0
    num_topk_log_probs: int = 0  # K of RolloutTopK; 0 leaves it out
    capture_routes: bool = False
    max_turn_tokens: int | None = None  # limit of one request; None: only max_response_tokens limits it


@dataclass(frozen=True)
class Request:
    """Request for one response to a prompt."""

    id: str
    prompt_tokens: tuple[int, ...]
    noise_key: tuple[int, int, int]  # (seed, rollout, sample); with the position it determines the noise
    partial: Sample | None = None  # tokens sampled so far; sampling resumes after them
    # Engines do not read these three; environments do:
    prompt: Prompt | None = None  # the prompt of the conversation
    is_chat: bool = False  # whether the prompt is a list of messages; later turns are messages then too
    messages: tuple[Message, ...] | None = None  # that open it

    def prompt_of(self, response: Sample) -> tuple[int, ...]:
        """Return the prompt that a response follows: an agent writes its own."""
        return self.prompt_tokens if response.prompt_tokens is None else response.prompt_tokens


@dataclass(frozen=True)
class EngineCounts:
    """Counts of the engine's retries, time-outs and tokens since it was built, evaluations included.

    Unlike `RolloutCounts`, it includes responses that are still open. The embedded engine counts only prompt
    tokens and cached tokens; the other counts concern servers.
    """

    num_retries: int = 0  # calls to servers that were repeated
    num_maybe_sampled_twice: int = 0  # requests sent again that a server may have sampled already
    num_timed_out: int = 0  # requests aborted at one server because they took too long
    num_unanswered: int = 0  # requests dropped: no response in time, or within the attempts
    num_refused_answers: int = 0  # requests dropped: the response failed a check
    num_requeued: int = 0  # times that a request moved to another server after a failure
    num_retractions: int = 0  # times that a server dropped a request's cache and recomputed it
    num_without_routes: int = 0  # responses with missing or unusable routes that were requested
    num_prompt_tokens: int = 0  # input tokens of the responses that were kept, resumed tokens included
    num_cached_tokens: int = 0  # prompt tokens that the engine found in its cache

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return each count as an `engine/...` metric. Call it on totals."""
        return {f"engine/{name.removeprefix('num_')}": float(value) for name, value in asdict(self).items()}


Ask = Callable[[Request, SamplingParams], Awaitable[Sample]]
"""Samples the response of one turn; returns an aborted one if there is no response."""
KEYS_APART = 1 << 40
"""Distance of the noise keys of an episode's conversations: above the number of any sample of a rollout."""


class RolloutEngine(Protocol):
    """Samples responses with weights that it receives under Hugging Face names.

    Ownership: the engine owns its copy of the weights; `load_weights` copies and keeps no reference.
    """

    @property
    def weight_version(self) -> int:
        """Version of the last complete `load_weights`; -1 before the first."""
        ...

    @property
    def counts(self) -> EngineCounts:
        """Counts of retries, time-outs and tokens since the engine was built, over all calls of `generate`."""
        ...

    @property
    def refusals(self) -> Mapping[str, int]:
        """Number of responses that were refused since the engine was built, by server's URL."""
        ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """Sample one response per request, in order; blocks until the last one ends."""
        ...

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager["Session"]:
        """Open a session with the engine's current weights; leaving it cancels the requests in flight.

        Several threads may have open sessions at once. Leaving a session adds its counts to `counts`.

        Args:
            may_be_held: Whether `hold` may be called. If so, responses must fit as prompts, to be resumed.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace all weights, and return a checksum of the received tensors.

        Args:
            weights: Hugging Face checkpoint names (one name per expert) and full tensors.
            version: Weight version that samples report from now on.

        Returns:
            `engines.embedded.engine.WeightChecksum` over the names and tensors received, in order.
        """
        ...


class Session(Protocol):
    """Samples responses one by one, in one event loop, with weights of one version.

    Attributes:
        is_held: Whether `hold` was called.
        errors: Errors of failed requests, by request id. A request that a hold interrupted has no entry.
    """

    is_held: bool
    errors: Mapping[str, RolloutError]

    def conversation(self, request_id: str) -> AbstractContextManager[None]:
        """Announce that requests with this id may be asked while the body runs.

        A session that samples in batches waits until every open conversation asks. Other sessions ignore it.
        """
        return nullcontext()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        """Sample one response. May be called at any time, also while other responses are sampled.

        Returns:
            The response. If the request failed, `give_up(request)`, and `errors` has its error. After a hold,
            the tokens so far, with finish_reason "abort".
        """
        ...

    async def hold(self) -> None:
        """Abort all requests in flight; when this returns, the engine samples nothing more for this session.

        The call raises nothing. It ends within a time that the engine documents, even if the engine's servers
        do not respond. Every pending `ask` then returns, and later calls return `give_up(request)` at once.
        """
        ...


def input_tokens(request: Request) -> TokenIds:
    """Return the prompt and the response tokens sampled so far; the next call forwards them."""
    return TokenIds(request.prompt_tokens, request.partial and request.partial.tokens)


def num_tokens_before(request: Request) -> int:
    """Return the number of response tokens sampled so far."""
    return request.partial.tokens.numel() if request.partial else 0


def num_tokens_left(request: Request, params: SamplingParams) -> int:
    """Return the number of response tokens that may still be sampled for this request."""
    left = params.max_response_tokens - num_tokens_before(request)
    return left if params.max_turn_tokens is None else min(left, params.max_turn_tokens)


def resume_request(
    request: Request, response: Sample, params: SamplingParams
) -> tuple[Request, SamplingParams] | None:
    """Return the request for the rest of an interrupted turn, or None if the turn may have no more tokens.

    `params.max_turn_tokens` limits the complete turn, so the tokens sampled so far are subtracted from it. The
    response to the returned request is the complete turn, and may be resumed in the same way.

    Args:
        request: Request for the turn, or for the rest of it.
        response: Its tokens so far; they begin with `request.partial`.
        params: Sampling parameters of `request`.
    """
    num_new = response.tokens.numel() - num_tokens_before(request)
    if num_new == 0:
        return request, params
    if params.max_turn_tokens is not None:
        params = dataclasses.replace(params, max_turn_tokens=params.max_turn_tokens - num_new)
    request = dataclasses.replace(request, partial=response)
    return (request, params) if num_tokens_left(request, params) > 0 else None


def first_route_row(request: Request) -> int:
    """Return the index of the first token whose routes are still missing."""
    if request.partial is None:
        return 0
    routes = request.partial.routed_experts
    return len(input_tokens(request)) - 1 if routes is None else routes.indices.shape[0]


def response_alone(
    request_id: str,
    tokens: Tensor,
    rollout_log_probs: Tensor,
    finish_reason: FinishReason,
    topk: RolloutTopK | None = None,
    routed_experts: RoutedExperts | None = None,
    weight_versions: tuple[WeightVersionSpan, ...] = (),
    *,
    loss_mask: Tensor | None = None,
    **more: Any,
) -> Sample:
    """Return a response without its prompt, as engines do.

    Args:
        request_id: Id of its request.
        tokens: [R] int64, end-of-sequence included.
        rollout_log_probs: [R] float32, of the sampling distribution.
        finish_reason: Why it ended.
        topk: Top-K of its tokens.
        routed_experts: Rows for prompt and response, without the last token.
        weight_versions: Versions of the weights that sampled it.
        loss_mask: [R] bool: True for sampled tokens; None means that all were sampled.
        more: Other fields of `Sample`.
    """
    mask = torch.ones(tokens.numel(), dtype=torch.bool) if loss_mask is None else loss_mask
    of_response: Any = {"topk": topk, "routed_experts": routed_experts, "weight_versions": weight_versions}
    return Sample(request_id, "", tokens, 0, mask, rollout_log_probs, finish_reason, **of_response, **more)


def with_prompt(response: Sample, request: Request) -> Sample:
    """Return a complete response with its prompt, and its branches with theirs, numbered from 1."""

    def whole(each: Sample, branch: int) -> Sample:
        prompt = torch.tensor(request.prompt_of(each), dtype=torch.int64)
        return dataclasses.replace(
            each,
            id=f"{request.id}#{branch}" if branch else request.id,
            branch=branch,
            group_id=request.id.rpartition("+")[0],
            tokens=torch.cat([prompt, each.tokens]),
            prompt_length=len(prompt),
            prompt_tokens=None,
            branches=tuple(whole(other, number) for number, other in enumerate(each.branches, start=1)),
        )

    return whole(response, 0)


def give_up(request: Request) -> Sample:
    """Return the response of a request without one: its earlier tokens, if any, and "abort"."""
    if request.partial is not None:
        return request.partial
    nothing = torch.zeros(0)
    return response_alone(request.id, nothing.long(), nothing, "abort")


def with_observation(response: Sample, tokens: Tensor) -> Sample:
    """Append an environment's observation `[N]` int64 to a response, for the request of the next turn.

    Observation tokens are not trained on: their `loss_mask` is False, their log-probs are zeros that nothing
    reads, and their top-K is padding. Their routes come with the next turn.
    """
    topk, nothing = response.topk, torch.zeros(tokens.numel())
    if topk is not None:
        num_columns = topk.ids.shape[1]
        padding = topk.ids.new_full((tokens.numel(), num_columns), -1)
        improbable = topk.log_probs.new_full(padding.shape, -torch.inf)
        topk = RolloutTopK(joined(topk.ids, padding), joined(topk.log_probs, improbable))
    return dataclasses.replace(
        response,
        tokens=joined(response.tokens, tokens),
        rollout_log_probs=joined(response.rollout_log_probs, nothing),
        loss_mask=joined(response.loss_mask, nothing.bool()),
        topk=topk,
        finish_reason="abort",
    )


def shortened(response: Sample, num_tokens: int) -> Sample:
    """Return a response's first `num_tokens` tokens, with their log-probs, top-K, routes and versions.

    The response itself must not be used any more: what is appended to the result may overwrite the rest.
    """
    topk, routes = response.topk, response.routed_experts
    if topk is not None:
        topk = RolloutTopK(cut(topk.ids, num_tokens), cut(topk.log_probs, num_tokens))
    if routes is not None:
        num_rows = routes.indices.shape[0] - (response.tokens.numel() - num_tokens)
        routes = dataclasses.replace(routes, indices=cut(routes.indices, num_rows))
    return dataclasses.replace(
        response,
        tokens=cut(response.tokens, num_tokens),
        rollout_log_probs=cut(response.rollout_log_probs, num_tokens),
        topk=topk,
        routed_experts=routes,
        loss_mask=cut(response.loss_mask, num_tokens),
        weight_versions=tuple(
            dataclasses.replace(span, stop=min(span.stop, num_tokens))
            for span in response.weight_versions
            if span.start < num_tokens
        ),
    )


def join_parts(partial: Sample, rest: Sample) -> Sample:
    """Join the tokens of `partial` and `rest` into one response, with the finish reason of `rest`.

    If one of them lacks the top-K or the routes, so does the result. The routes of `rest` begin with the first
    row that `partial` lacks. Moves, retractions and cached tokens are summed: a response that was retracted
    once still counts as retracted after it is resumed.
    """
    topk = routes = None
    if partial.topk is not None and rest.topk is not None:
        topk = RolloutTopK(
            joined(partial.topk.ids, rest.topk.ids),
            joined(partial.topk.log_probs, rest.topk.log_probs),
        )
    if partial.routed_experts is not None and rest.routed_experts is not None:
        indices = joined(partial.routed_experts.indices, rest.routed_experts.indices)
        routes = dataclasses.replace(rest.routed_experts, indices=indices)
    return dataclasses.replace(
        rest,
        tokens=joined(partial.tokens, rest.tokens),
        rollout_log_probs=joined(partial.rollout_log_probs, rest.rollout_log_probs),
        loss_mask=joined(partial.loss_mask, rest.loss_mask),
        topk=topk,
        routed_experts=routes,
        weight_versions=_joined_spans(partial, rest),
        num_moves=partial.num_moves + rest.num_moves,
        num_retractions=partial.num_retractions + rest.num_retractions,
        num_cached_tokens=partial.num_cached_tokens + rest.num_cached_tokens,
    )


def mask_of(response: Sample) -> Tensor:
    """Return a response's `loss_mask`, by the name that functions of `rollout.generate` may use."""
    return response.loss_mask


def _joined_spans(partial: Sample, rest: Sample) -> tuple[WeightVersionSpan, ...]:
    offset, spans = partial.tokens.numel(), list(partial.weight_versions)
    for span in rest.weight_versions:
        start, stop = span.start + offset, span.stop + offset
        if spans and (spans[-1].version, spans[-1].stop) == (span.version, start):
            start = spans.pop().start
        spans.append(WeightVersionSpan(start, stop, span.version))
    return tuple(spans)


class _AnySample(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Sample)


class Completion(metaclass=_AnySample):
    """Older name of a response alone, for functions of `rollout.generate`: calling it makes a `Sample`."""

    def __new__(cls, request_id: str, tokens: Tensor, log_probs: Tensor, *rest: Any, **more: Any) -> Sample:
        """Take the arguments of `response_alone`, of which the third one is `log_probs` here."""
        return response_alone(request_id, tokens, log_probs, *rest, **more)
