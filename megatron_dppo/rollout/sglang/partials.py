"""Responses that were aborted and go on: what is sent then, and how old and new become one completion.

The server computes prompt and old tokens again, by the weights that it holds now. What is old stays as it was
sampled: its log-probs, its top-K and its routes. Only the last old token has no routes yet, since a token's
routes come with its forward: they are the first row that is asked of the server.
"""

import dataclasses

import torch

from megatron_dppo.rollout.engine import Completion, Request, SamplingParams
from megatron_dppo.types import RolloutTopK, WeightVersionSpan


def input_tokens(request: Request) -> list[int]:
    """The prompt, and what was sampled of the response before."""
    return [*request.prompt_tokens, *(request.partial.tokens.tolist() if request.partial else ())]


def num_tokens_left(request: Request, params: SamplingParams) -> int:
    """Response tokens that may still be sampled."""
    return params.max_response_tokens - (request.partial.tokens.numel() if request.partial else 0)


def first_route_row(request: Request) -> int:
    """The first token whose routes are not there yet."""
    return len(input_tokens(request)) - 1 if request.partial else 0


def aborted(request: Request) -> Completion:
    """What there is of a request that was not answered: what was sampled before, or nothing."""
    if request.partial is not None:
        return request.partial
    nothing = torch.zeros(0)
    return Completion(request.id, nothing.long(), nothing, "abort", None, None, ())


def joined(partial: Completion, rest: Completion) -> Completion:
    """One completion of what was sampled before, and of what came after; ends as `rest` does.

    Top-K and routes that either of them lacks are left out of the whole. The routes of `rest` begin with the
    row of the last token of `partial`.
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
    )


def _joined_spans(partial: Completion, rest: Completion) -> tuple[WeightVersionSpan, ...]:
    offset, spans = partial.tokens.numel(), list(partial.weight_versions)
    for span in rest.weight_versions:
        start, stop = span.start + offset, span.stop + offset
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(WeightVersionSpan(start, stop, span.version))
    return tuple(spans)
