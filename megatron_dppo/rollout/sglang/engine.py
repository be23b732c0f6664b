"""The engine that asks an SGLang server: n requests for each prompt, every answer checked."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from megatron_dppo.errors import ReplyError, RolloutError, ServerError, WeightSyncError
from megatron_dppo.rollout.engine import Completion, Request, SamplingParams
from megatron_dppo.rollout.sglang.client import CallCounts, Patience, SglangClient
from megatron_dppo.rollout.sglang.protocol import Generation, Reply, ServedModel, ServerFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerCounts:
    """What became of the requests of one `generate`."""

    calls: CallCounts
    num_unanswered: int  # dropped: no answer came in time, or within the attempts
    num_refused_answers: int  # dropped: an answer came that is not one
    num_without_routes: int  # whose routes were asked for and are faulty
    num_prompt_tokens: int  # of the answers that were kept
    num_cached_tokens: int  # of them, those that the server did not compute again
    num_retractions: int


class SglangEngine:
    """Samples from one server; implements `rollout.engine.RolloutEngine`.

    Sampling noise is the server's own: `Request.noise_key` is not used, and a run is not repeated bit for bit.
    Log-probs are of the distribution after temperature; with a `top_p` below 1, of the one before the cut.
    """

    def __init__(
        self,
        url: str,
        model: ServedModel,
        patience: Patience | None = None,
        *,
        max_concurrent_requests: int = 256,
        api_key: str | None = None,
    ) -> None:
        """Connect once, so that a server that cannot be used is known at start-up.

        Args:
            url: "http://host:port" of a server that answers.
            model: What it serves.
            patience: Time-outs and retries.
            max_concurrent_requests: Requests that the server is given at a time.
            api_key: What the server was started with.

        Raises:
            ServerError: The server does not answer, is of an unknown version, or has options that we refuse.
        """
        self._url, self._model, self._patience = url, model, patience or Patience()
        self._max_concurrent, self._api_key = max_concurrent_requests, api_key
        self._weight_version = asyncio.run(self._facts()).weight_version
        self.counts: AnswerCounts | None = None

    @property
    def weight_version(self) -> int:
        """Version of the weights that the server held when this engine connected."""
        return self._weight_version

    def admit(self, urls: Sequence[str], version: int) -> None:
        """From now on requests go to these servers, which hold this version."""
        self._url, self._weight_version = urls[0], version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Refuse: tensors do not reach a server through this call.

        Raises:
            WeightSyncError: Always.
        """
        raise WeightSyncError(
            f"weight version {version}: found an SGLang server, whose weights no weight sync of this version "
            "reaches; expected the embedded engine. Set rollout.engine = 'transformers' to train."
        )

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one response per request, in their order; see `RolloutEngine`.

        A request without a usable answer comes back aborted and empty, and is counted in `counts`.

        Raises:
            RolloutError: A prompt does not fit, or the server cannot give what `params` asks for.
            ServerError: The server does not answer, holds other weights than before, or answered no request.
        """
        return asyncio.run(self._generate(requests, params))

    async def _facts(self) -> ServerFacts:
        async with self._client() as client:
            return (await client.connect())[1]

    def _client(self) -> SglangClient:
        return SglangClient(self._url, self._patience, api_key=self._api_key)

    async def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        async with self._client() as client:
            generation, facts = await client.connect()
            self._refuse_other_weights(facts)
            refuse_requests(requests, params, self._model, facts)
            places = asyncio.Semaphore(self._max_concurrent)

            async def ask(request: Request) -> Reply | RolloutError:
                async with places:
                    return await _answer(client, generation, request, params, self._model)

            answers = await asyncio.gather(*(ask(request) for request in requests))
            lost = [answer for answer in answers if isinstance(answer, ServerError)]
            if lost and (len(lost) == len(answers) or not await client.is_healthy()):
                raise lost[0]
            self.counts = _count(client.counts, requests, answers)
        return [
            answer.completion if isinstance(answer, Reply) else _without_tokens(request)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _refuse_other_weights(self, facts: ServerFacts) -> None:
        if facts.weight_version != self._weight_version:
            raise ServerError(
                f"{self._url}: found weights of version {facts.weight_version}; expected {self._weight_version}"
                ". The server was restarted, or someone else gave it weights: push them again before sampling."
            )


def refuse_requests(
    requests: Sequence[Request], params: SamplingParams, model: ServedModel, facts: ServerFacts
) -> None:
    """Raise for whatever the server would refuse, answer differently than asked, or end over.

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
    longest = min(facts.max_prompt_tokens, facts.max_tokens - params.max_response_tokens)
    seen: set[str] = set()
    for request in requests:
        tokens = request.prompt_tokens
        if not 1 <= len(tokens) <= longest:
            _refuse(
                f"request {request.id}: found {len(tokens)} prompt tokens and up to "
                f"{params.max_response_tokens} response tokens",
                f"at least 1 prompt token, and at most {facts.max_tokens} tokens together",
                "Lower data.max_prompt_tokens or rollout.max_response_tokens, or raise sglang.context_length.",
            )
        if min(tokens) < 0 or max(tokens) >= model.vocab_size:  # a server ends over one
            found = f"request {request.id}: found token ids {min(tokens)} to {max(tokens)}"
            _refuse(found, f"0 to {model.vocab_size - 1}", "Use the tokenizer of this model.")
        if request.id in seen:
            _refuse(f"found two requests {request.id}", "ids that differ", "This is a fault of the caller.")
        seen.add(request.id)


def _refuse(found: str, expected: str, action: str) -> NoReturn:
    raise RolloutError(f"{found}; expected {expected}. {action}")


async def _answer(
    client: SglangClient,
    generation: Generation,
    request: Request,
    params: SamplingParams,
    model: ServedModel,
) -> Reply | RolloutError:
    """The checked answer to one request, or why there is none."""
    try:
        body = await client.generate(generation.generate_body(request, params, model))
        reply = generation.read_reply(body, request, params, model)
    except (ServerError, ReplyError) as error:
        logger.warning("request %s is dropped: %s", request.id, error)
        return error
    if reply.routes_fault is not None:
        logger.warning("request %s has no routes: %s", request.id, reply.routes_fault)
    return reply


def _count(
    calls: CallCounts, requests: Sequence[Request], answers: Sequence[Reply | RolloutError]
) -> AnswerCounts:
    replies = [answer for answer in answers if isinstance(answer, Reply)]
    asked = zip(requests, answers, strict=True)
    return AnswerCounts(
        calls=calls,
        num_unanswered=sum(isinstance(answer, ServerError) for answer in answers),
        num_refused_answers=sum(isinstance(answer, ReplyError) for answer in answers),
        num_without_routes=sum(reply.routes_fault is not None for reply in replies),
        num_prompt_tokens=sum(len(request.prompt_tokens) for request, a in asked if isinstance(a, Reply)),
        num_cached_tokens=sum(reply.num_cached_tokens for reply in replies),
        num_retractions=sum(reply.num_retractions for reply in replies),
    )


def _without_tokens(request: Request) -> Completion:
    """What stands for a response that never came, or cannot be used: aborted, and so dropped and counted."""
    nothing = torch.zeros(0)
    return Completion(request.id, nothing.long(), nothing, "abort", None, None, ())
