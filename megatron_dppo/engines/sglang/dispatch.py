"""States of requests; refuses requests that no server could serve, chooses servers, and counts results."""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    give_up,
    input_tokens,
)
from megatron_dppo.engines.sglang.client import new_rid
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.errors import ReplyError, RolloutError
from megatron_dppo.types import Sample

State = Literal["waiting", "sent", "answered", "dropped", "given up", "failed"]
"""State of a request: in the queue, at a server, or ended: with a response, with an error that is counted, with
the tokens that it had when it was sent, or with an error that the caller gets."""
Event = Literal["refused", "slow", "lost"]
"""What happens to a request: its response fails a check, its server responds too late, or the server is drained
(and whether it sampled a response is unknown)."""
Situation = Literal["held", "no server", "last try", "open"]
"""The first of these that is true: the session is held, all servers are drained, no server is left for this
request, or another server may take it."""
NEXT: Mapping[tuple[Event, Situation], State] = {
    ("refused", "held"): "dropped",
    ("refused", "no server"): "dropped",
    ("refused", "last try"): "dropped",
    ("refused", "open"): "waiting",
    ("slow", "held"): "dropped",
    ("slow", "no server"): "dropped",
    ("slow", "last try"): "dropped",
    ("slow", "open"): "dropped",  # another server would take as long
    ("lost", "held"): "given up",  # a later session resumes it
    ("lost", "no server"): "failed",
    ("lost", "last try"): "dropped",
    ("lost", "open"): "waiting",
}
"""The state of a request after an event. Sending makes "waiting" "sent", and a sound response "answered"."""
MOST_REFUSED = 2
"""Refused responses in a row after which a server gets no request while another one may show its fault."""


@dataclass(eq=False)
class Asked:
    """A request with its state, its future completion, its number of moves and who failed at it."""

    request: Request
    params: SamplingParams
    completion: asyncio.Future[Sample]
    state: State = "waiting"
    num_moves: int = 0
    refused_by: set[str] = field(default_factory=set[str])  # URLs of servers whose responses were refused
    refusal: RolloutError | Sample | None = None  # why the last one was, or the response itself

    def complete(self, completion: Sample) -> None:
        """Set the completion, and add the request's moves."""
        if not self.completion.done():  # else no caller waits for it any more
            self.completion.set_result(replace(completion, num_moves=completion.num_moves + self.num_moves))

    def fail(self, error: BaseException) -> None:
        """Raise an error in the caller that waits for the completion."""
        if not self.completion.done():
            self.completion.set_exception(error)


class InFlight:
    """A request that was sent to a server and has no response yet; each attempt has a new id `rid` there."""

    def __init__(self, asked: Asked, url: str) -> None:
        self.asked, self.url = asked, url
        self.renew()

    def renew(self) -> str:
        """Replace the id for the next attempt, and return it."""
        self.rid = new_rid(self.asked.request.id)
        return self.rid


class AtFaultError(Exception):
    """The request must move, because its server has the `ServerError` that is the argument."""


class NotFiniteError(ReplyError):
    """The response has log-probs that are not finite, which a server with broken weights or kernels returns."""

    def __init__(self, url: str, completion: Sample) -> None:
        self.completion = completion
        super().__init__(f"{url}: found log-probs that are not finite; expected finite ones. Look at its log.")


@dataclass
class _Place:
    """Load of one server, as known to this process, and what became of its responses."""

    num_in_flight: int = 0  # requests of this session without a response
    num_of_others: int = 0  # other requests that the server last reported
    is_drained: bool = False
    num_refused: int = 0  # responses in a row that were refused
    accepted_at: int = 0  # responses of all servers accepted before and with its last one; 0: none of its own

    @property
    def load(self) -> int:
        return self.num_in_flight + self.num_of_others


class LoadBalancer:
    """Chooses a server for each request of one session; sends no request itself.

    It draws two servers at random and takes the less loaded one. If many processes share the servers and all
    sent to the least loaded one, they would overload it. A group's next request goes to the previous
    one's server, which has the prompt in its cache, unless that server is drained or full.
    """

    def __init__(self, urls: Sequence[str], max_in_flight: int, chance: random.Random | None = None) -> None:
        """Start with all servers admitted and idle.

        Args:
            urls: URLs of the servers.
            max_in_flight: Largest number of requests in flight at one server, from this session.
            chance: Random generator that draws the two servers; None creates one.
        """
        self._places = {url: _Place() for url in urls}
        self._max_in_flight, self._num_accepted = max_in_flight, 0
        self._homes: dict[str, str] = {}
        self._chance = chance or random.Random()

    def limit(self, num_connections: int) -> None:
        """Send servers together at most so many requests at once."""
        self._max_in_flight = max(min(self._max_in_flight, num_connections // len(self._places)), 1)

    @property
    def serving(self) -> tuple[str, ...]:
        """URLs of the servers that are not drained."""
        return tuple(url for url, place in self._places.items() if not place.is_drained)

    def take(self, group: str, without: Collection[str] = ()) -> str | None:
        """Choose a server for a request of `group`, and count it as sent; return None if all are full.

        Args:
            group: Group of the request.
            without: Servers that failed at the request.
        """
        there = [url for url in self.serving if url not in without]
        trusted = [url for url in there if self._places[url].num_refused < MOST_REFUSED]
        free = [url for url in trusted or there if self._places[url].num_in_flight < self._max_in_flight]
        if not free:
            return None
        url = self._homes.get(group)
        if url not in free:
            url = self._less_loaded(free)
            self._homes[group] = url
        self._places[url].num_in_flight += 1
        return url

    def give_back(self, url: str) -> None:
        """Count one request as no longer in flight at the server."""
        place = self._places[url]
        assert place.num_in_flight > 0, "a request is given back at most once"
        place.num_in_flight -= 1

    def report(self, url: str, num_requests: int) -> None:
        """Update a server's load: its running and waiting requests, including the requests of this session."""
        place = self._places[url]
        place.num_of_others = max(num_requests - place.num_in_flight, 0)

    def accept(self, url: str) -> None:
        """Note a sound response of a server."""
        self._num_accepted += 1
        self._places[url].num_refused, self._places[url].accepted_at = 0, self._num_accepted

    def refuse(self, url: str) -> None:
        """Note a response of a server that was refused."""
        self._places[url].num_refused += 1

    @property
    def at_fault(self) -> tuple[str, ...]:
        """URLs of servers whose responses are refused while later ones of another server are not."""
        last = max((self._places[url].accepted_at for url in self.serving), default=0)
        return tuple(
            url
            for url in self.serving
            if self._places[url].num_refused >= MOST_REFUSED and self._places[url].accepted_at < last
        )

    def drain(self, url: str) -> None:
        """Stop choosing the server; each request in flight there still needs its `give_back`."""
        self._places[url].is_drained = True

    def _less_loaded(self, free: Sequence[str]) -> str:
        drawn = self._chance.sample(free, min(2, len(free)))
        return min(drawn, key=lambda url: self._places[url].load)


def group_of(request_id: str) -> str:
    """Return the group of a request: its id up to the last "+"."""
    return request_id.rpartition("+")[0] or request_id


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
        is_aborted: Whether responses may be interrupted, and then sent as prompts to resume them.
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
        tokens = input_tokens(request).tolist()
        if min(tokens) < 0 or max(tokens) >= model.vocab_size:  # another id crashes the server
            found = f"request {request.id}: found token ids {min(tokens)} to {max(tokens)}"
            _refuse(found, f"0 to {model.vocab_size - 1}", "Use the tokenizer of this model.")
        if request.id in seen:
            _refuse(f"found two requests {request.id}", "unique ids", "This is a fault of the caller.")
        seen.add(request.id)
        if request.partial is not None:
            _refuse_partial(request.id, request.partial, params)


def _refuse_partial(request_id: str, partial: Sample, params: SamplingParams) -> None:
    num_tokens, num_topk = partial.tokens.numel(), partial.topk.ids.shape[1] if partial.topk else 0
    if not 1 <= num_tokens < params.max_response_tokens or num_topk != params.num_topk_log_probs:
        _refuse(
            f"request {request_id}: found {num_tokens} tokens sampled before, with {num_topk} log-probs each",
            f"1 to {params.max_response_tokens - 1} of them, with {params.num_topk_log_probs}",
            "This is a fault of the caller: report it.",
        )


def _refuse(found: str, expected: str, action: str) -> NoReturn:
    raise RolloutError(f"{found}; expected {expected}. {action}")


def count_result(request: Request, answer: Sample | RolloutError) -> EngineCounts:
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
