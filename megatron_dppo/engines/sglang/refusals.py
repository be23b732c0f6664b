"""Refuses requests that a server would reject, sample differently than requested, or crash on."""

from collections.abc import Sequence
from typing import NoReturn

from megatron_dppo.engines.base import Completion, Request, SamplingParams, input_tokens
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.errors import RolloutError


def refuse_requests(
    requests: Sequence[Request],
    params: SamplingParams,
    model: ServedModel,
    facts: ServerFacts,
    *,
    is_aborted: bool = False,
) -> None:
    """Raise for requests that the server would reject, sample differently than requested, or crash on.

    Args:
        requests: Requests to send.
        params: Sampling parameters.
        model: Model that the server serves.
        facts: Limits that the server reports.
        is_aborted: Whether responses may be aborted, and then sent as prompts to resume them.

    Raises:
        RolloutError: A request or `params` is refused; the message names it.
    """
    if params.max_response_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        expected = "max_response_tokens >= 1, temperature >= 0 and 0 < top_p <= 1"
        _refuse(f"found {params}", expected, "Correct the sampling parameters.")
    num_topk = params.num_topk_log_probs
    if not 0 <= num_topk <= model.vocab_size:  # a larger one crashes the server
        expected = f"0 to the vocabulary of {model.vocab_size}"
        _refuse(f"found num_topk_log_probs = {num_topk}", expected, "Lower rollout.num_topk_log_probs.")
    if num_topk and params.top_p < 1:
        expected = "top_p = 1: the server computes its top-K before it applies top_p"
        _refuse(f"found num_topk_log_probs with top_p = {params.top_p:g}", expected, "Leave one of them out.")
    if params.capture_routes and (model.routing is None or not facts.captures_routes):
        found = "a model without experts" if model.routing is None else "a server that captures no routes"
        expected = "experts, and a server that megatron-dppo serve started with rollout.routing_replay on"
        _refuse(
            f"found capture_routes for {found}", expected, "Restart it, or set rollout.routing_replay = 'off'."
        )
    most = facts.max_prompt_tokens + 1 if is_aborted else facts.max_tokens  # prompts lack the last token
    longest = min(facts.max_prompt_tokens, most - params.max_response_tokens)
    seen: set[str] = set()
    for request in requests:
        tokens = request.prompt_tokens
        if not 1 <= len(tokens) <= longest:
            _refuse(
                f"request {request.id}: found {len(tokens)} prompt tokens and up to "
                f"{params.max_response_tokens} response tokens",
                f"at least 1 prompt token, and at most {most} tokens together",
                "Lower data.max_prompt_tokens or rollout.max_response_tokens, or raise sglang.context_length.",
            )
        tokens = input_tokens(request)
        if min(tokens) < 0 or max(tokens) >= model.vocab_size:  # another id crashes the server
            found = f"request {request.id}: found token ids {min(tokens)} to {max(tokens)}"
            _refuse(found, f"0 to {model.vocab_size - 1}", "Use the tokenizer of this model.")
        if request.id in seen:
            _refuse(f"found two requests {request.id}", "unique ids", "This is a fault of the caller.")
        seen.add(request.id)
        if request.partial is not None:
            _refuse_partial(request.id, request.partial, params)


def _refuse_partial(request_id: str, partial: Completion, params: SamplingParams) -> None:
    num_tokens, num_topk = partial.tokens.numel(), partial.topk.ids.shape[1] if partial.topk else 0
    if not 1 <= num_tokens < params.max_response_tokens or num_topk != params.num_topk_log_probs:
        _refuse(
            f"request {request_id}: found {num_tokens} tokens sampled before, with {num_topk} log-probs each",
            f"1 to {params.max_response_tokens - 1} of them, with {params.num_topk_log_probs}",
            "This is a fault of the caller: report it.",
        )


def _refuse(found: str, expected: str, action: str) -> NoReturn:
    raise RolloutError(f"{found}; expected {expected}. {action}")
