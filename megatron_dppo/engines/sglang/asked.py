"""A request from being asked for to its answer, and what is counted of it."""

import asyncio
from dataclasses import dataclass, replace

from megatron_dppo.engines.base import Completion, Request, SamplingParams, aborted, input_tokens
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.client import new_rid
from megatron_dppo.errors import ReplyError, RolloutError, ServerError


@dataclass(eq=False)
class Asked:
    """A request that is neither answered nor given up nor interrupted yet."""

    request: Request
    params: SamplingParams
    completion: asyncio.Future[Completion]
    num_moves: int = 0

    def complete(self, completion: Completion) -> None:
        """Return a completion to those who asked, with the moves of its request."""
        if not self.completion.done():  # else nobody waits for it any more
            self.completion.set_result(replace(completion, num_moves=completion.num_moves + self.num_moves))

    def fail(self, error: BaseException) -> None:
        """Raise an error where the request was asked for."""
        if not self.completion.done():
            self.completion.set_exception(error)


class InFlight:
    """A request that was sent to a server and is not answered yet.

    Attributes:
        asked: The request.
        url: Of the server.
        rid: Its id at the server; each attempt has its own.
    """

    def __init__(self, asked: Asked, url: str) -> None:
        self.asked, self.url, self.rid = asked, url, new_rid(asked.request.id)

    def renew(self) -> str:
        """Give the next attempt its id, and return it."""
        self.rid = new_rid(self.asked.request.id)
        return self.rid


@dataclass(frozen=True)
class Answer:
    """What one server made of one request."""

    content: Completion | RolloutError
    fault: ServerError | None = None  # why another server must be asked; none: the content is final


def counted(request: Request, answer: Completion | RolloutError) -> EngineCounts:
    """Count one answer; what happened to the tokens sampled before was counted when they came."""
    if isinstance(answer, RolloutError):
        is_reply = isinstance(answer, ReplyError)
        return EngineCounts(num_unanswered=not is_reply, num_refused_answers=is_reply)
    before = aborted(request)
    has_new_tokens = answer.tokens.numel() > before.tokens.numel()
    return EngineCounts(
        num_retractions=answer.num_retractions - before.num_retractions,
        num_without_routes=has_new_tokens and answer.routes_fault is not None,
        num_prompt_tokens=len(input_tokens(request)),
        num_cached_tokens=answer.num_cached_tokens - before.num_cached_tokens,
    )
