"""Rollout engine that samples from SGLang servers: one request per response, every answer checked."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from typing import NoReturn

from torch import Tensor

from megatron_dppo.errors import ReplyError, RolloutError, ServerError, WeightSyncError
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.rollout.engine import Completion, IsEnough, Request, SamplingParams, input_tokens
from megatron_dppo.rollout.sglang.client import Patience, SglangClient
from megatron_dppo.rollout.sglang.dispatcher import Dispatcher, Link, other_weights
from megatron_dppo.rollout.sglang.protocol import ServedModel, ServerFacts

logger = logging.getLogger(__name__)

_NO_VERSION = -2  # -1 is that of weights which were never loaded


class SglangEngine:
    """Samples from servers that hold the same weights; implements `rollout.engine.InterruptibleEngine`.

    Sampling noise is the servers' own: `Request.noise_key` is not used, and a run is not repeated bit for bit.
    Log-probs are of the distribution after temperature; with a `top_p` below 1, of the one before the cut.

    Requests go to the servers that are admitted: all of them, until `admit` says otherwise. One that does not
    answer, or holds other weights, is drained for one `generate`, and tried again at the next.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        model: ServedModel,
        patience: Patience | None = None,
        *,
        max_concurrent_requests: int = 256,
        api_key: str | None = None,
    ) -> None:
        """Connect once, so that an unusable server is found at start-up.

        Args:
            urls: "http://host:port" of one or more servers that answer.
            model: What they serve.
            patience: Time-outs and retries.
            max_concurrent_requests: Requests that each server is given at a time.
            api_key: What the servers were started with.

        Raises:
            ServerError: No server answers, is of a known version, and has no options that we refuse.
        """
        self._urls = (urls,) if isinstance(urls, str) else tuple(dict.fromkeys(urls))
        self._model, self._patience = model, patience or Patience()
        self._max_concurrent, self._api_key = max_concurrent_requests, api_key
        self._admitted = self._urls
        self._weight_version = _common_version(asyncio.run(self._all_facts()))
        self._counts = EngineCounts()

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        return self._counts

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all servers of this engine, admitted or not."""
        return self._urls

    @property
    def weight_version(self) -> int:
        """Version of the weights that servers must hold to be given requests; -2 until servers agree on one."""
        return self._weight_version

    def admit(self, urls: Sequence[str], version: int) -> None:
        """Send requests to these servers from now on, at least one, and to no others.

        Args:
            urls: They hold weights of this version; one that registered since is known from now on.
            version: What they must report.
        """
        assert urls, "a push that reached no server raises"
        self._urls = tuple(dict.fromkeys([*self._urls, *urls]))
        self._admitted, self._weight_version = tuple(dict.fromkeys(urls)), version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Refuse: servers get their weights through a weight sync, not through this call.

        Raises:
            WeightSyncError: Always.
        """
        raise WeightSyncError(
            f"weight version {version}: found tensors for an engine whose servers hold the weights; "
            "expected a push by weight_sync, and then admit. This is a fault of the caller: report it."
        )

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one response per request, in their order; see `RolloutEngine`.

        A request without a usable answer comes back aborted and empty, and is counted in `counts`.

        Raises:
            RolloutError: A prompt does not fit, or the servers cannot give what `params` asks for.
            ServerError: No server is left that answers and holds the weights, or no request was answered.
        """
        return asyncio.run(self._generate(requests, params, None))

    def generate_until(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough
    ) -> list[Completion]:
        """Sample until it is enough, and abort the rest; see `InterruptibleEngine`.

        Raises:
            RolloutError: As `generate` does; also where a response that was aborted could become too long for
                the servers to go on with.
            ServerError: As `generate` does.
        """
        return asyncio.run(self._generate(requests, params, is_enough))

    def _client(self, url: str) -> SglangClient:
        return SglangClient(url, self._patience, api_key=self._api_key)

    async def _all_facts(self) -> list[ServerFacts]:
        """Return the facts of the servers that answer; the others are drained at the next `generate`."""

        async def facts_of(url: str) -> ServerFacts | RolloutError:
            try:
                async with self._client(url) as client:
                    return (await client.connect())[1]
            except (ServerError, ReplyError) as error:
                return error

        found = await asyncio.gather(*(facts_of(url) for url in self._urls))
        facts = [each for each in found if isinstance(each, ServerFacts)]
        if not facts:
            raise next(each for each in found if isinstance(each, RolloutError))
        return facts

    async def _generate(
        self, requests: Sequence[Request], params: SamplingParams, is_enough: IsEnough | None
    ) -> list[Completion]:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(url)) for url in self._admitted]
            links = await self._links(clients)
            for facts in dict.fromkeys(link.facts for link in links.values()):
                may_go_on = is_enough is not None or any(request.partial for request in requests)
                refuse_requests(requests, params, self._model, facts, is_aborted=may_go_on)
            dispatcher = Dispatcher(links, self._model, self._weight_version, self._max_concurrent)
            completions = await dispatcher.run(requests, params, is_enough)
            self._counts = sum((client.counts for client in clients), self._counts + dispatcher.counts)
        lost = [error for error in dispatcher.errors.values() if isinstance(error, ServerError)]
        if lost and len(lost) == len(requests):
            raise lost[0]
        return completions

    async def _links(self, clients: Sequence[SglangClient]) -> dict[str, Link]:
        """Return the admitted servers that answer and hold the weights, by URL.

        Raises:
            ServerError: There is none.
        """

        async def link(client: SglangClient) -> Link | RolloutError:
            try:
                generation, facts = await client.connect()
            except (ServerError, ReplyError) as error:
                return error
            if facts.weight_version != self._weight_version:
                return other_weights(client.url, facts.weight_version, self._weight_version)
            return Link(client, generation, facts)

        found = dict(zip(self._admitted, await asyncio.gather(*map(link, clients)), strict=True))
        links = {url: link for url, link in found.items() if isinstance(link, Link)}
        faults = {url: fault for url, fault in found.items() if isinstance(fault, RolloutError)}
        if not links:
            raise ServerError("\n".join(map(str, faults.values())))
        for url, fault in faults.items():
            logger.warning("server %s is drained: %s", url, fault)
        return links


def _common_version(facts: Sequence[ServerFacts]) -> int:
    """Return the weight version that all servers hold; servers that differ wait for a push."""
    versions = {each.weight_version for each in facts}
    return versions.pop() if len(versions) == 1 else _NO_VERSION


def refuse_requests(
    requests: Sequence[Request],
    params: SamplingParams,
    model: ServedModel,
    facts: ServerFacts,
    *,
    is_aborted: bool = False,
) -> None:
    """Raise for requests that the server would refuse, answer differently than asked, or crash on.

    Args:
        requests: To be sent.
        params: How to sample.
        model: What the server serves.
        facts: What it says of itself.
        is_aborted: Whether responses may be aborted, and sent as prompts to go on with them.

    Raises:
        RolloutError: Says which.
    """
    if params.max_response_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
        expected = "max_response_tokens >= 1, temperature >= 0 and 0 < top_p <= 1"
        _refuse(f"found {params}", expected, "Correct the sampling parameters.")
    num_topk = params.num_topk_log_probs
    if not 0 <= num_topk <= model.vocab_size:  # a server ends over more
        expected = f"0 to the vocabulary of {model.vocab_size}"
        _refuse(f"found num_topk_log_probs = {num_topk}", expected, "Lower rollout.num_topk_log_probs.")
    if num_topk and params.top_p < 1:
        expected = "top_p = 1: the server's top-K is of the distribution before the cut"
        _refuse(f"found num_topk_log_probs with top_p = {params.top_p:g}", expected, "Leave one of them out.")
    if params.capture_routes and (model.routing is None or not facts.captures_routes):
        found = "a model without experts" if model.routing is None else "a server that captures no routes"
        expected = "experts, and a server that megatron-dppo serve started with rollout.routing_replay on"
        _refuse(
            f"found capture_routes for {found}", expected, "Restart it, or set rollout.routing_replay = 'off'."
        )
    most = facts.max_prompt_tokens + 1 if is_aborted else facts.max_tokens  # the last token is never sent
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
        if min(tokens) < 0 or max(tokens) >= model.vocab_size:  # a server ends over one
            found = f"request {request.id}: found token ids {min(tokens)} to {max(tokens)}"
            _refuse(found, f"0 to {model.vocab_size - 1}", "Use the tokenizer of this model.")
        if request.id in seen:
            _refuse(f"found two requests {request.id}", "ids that differ", "This is a fault of the caller.")
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
