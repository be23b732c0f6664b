"""Pending requests: one awaiting its completion, one in flight at a server, and counts of its result."""

import asyncio
from dataclasses import dataclass, replace

from megatron_dppo.engines.base import Completion, Request, SamplingParams, give_up, input_tokens
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.client import new_rid
from megatron_dppo.errors import ReplyError, RolloutError, ServerError


@dataclass(eq=False)
class Asked:
    """A request awaiting its completion, with its future and its number of moves."""

    request: Request
    params: SamplingParams
    completion: asyncio.Future[Completion]
    num_moves: int = 0

    def complete(self, completion: Completion) -> None:
        """Set the completion, and add the moves of its request."""
        if not self.completion.done():  # else no caller waits for it any more
            self.completion.set_result(replace(completion, num_moves=completion.num_moves + self.num_moves))

    def fail(self, error: BaseException) -> None:
        """Raise an error in the caller that waits for the completion."""
        if not self.completion.done():
            self.completion.set_exception(error)


class InFlight:
    """A request that was sent to a server and has no response yet.

    Attributes:
        asked: The request.
        url: URL of the server.
        rid: Request id at the server; each attempt has a new one.
    """

    def __init__(self, asked: Asked, url: str) -> None:
        self.asked, self.url, self.rid = asked, url, new_rid(asked.request.id)

    def renew(self) -> str:
        """Replace the id for the next attempt, and return it."""
        self.rid = new_rid(self.asked.request.id)
        return self.rid


@dataclass(frozen=True)
class Answer:
    """Result of one request at one server."""

    content: Completion | RolloutError
    fault: ServerError | None = None  # the server's fault, so the request moves; None: content is final


def count_result(request: Request, answer: Completion | RolloutError) -> EngineCounts:
    """Return the counts of one result; tokens sampled in earlier requests were counted then."""
    if isinstance(answer, RolloutError):
        is_reply = isinstance(answer, ReplyError)
        return EngineCounts(num_unanswered=not is_reply, num_refused_answers=is_reply)
    before = give_up(request)
    has_new_tokens = answer.tokens.numel() > before.tokens.numel()
    return EngineCounts(
        num_retractions=answer.num_retractions - before.num_retractions,
        num_without_routes=has_new_tokens and answer.routes_fault is not None,
        num_prompt_tokens=len(input_tokens(request)),
        num_cached_tokens=answer.num_cached_tokens - before.num_cached_tokens,
    )
