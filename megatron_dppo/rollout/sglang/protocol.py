"""Protocol of an SGLang server: requests and answers, one adapter per generation of servers.

An adapter is chosen by the version that a server reports; one that was never run against is refused. Answers
are checked against what was asked for before anything is made of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor

from megatron_dppo.errors import ReplyError, RoutingReplayError, ServerError
from megatron_dppo.rollout.engine import (
    Completion,
    Request,
    SamplingParams,
    aborted,
    first_route_row,
    input_tokens,
    joined,
    num_tokens_left,
)
from megatron_dppo.rollout.sglang.decoding import (
    decode_log_probs,
    decode_routes,
    decode_tokens,
    decode_topk,
    decode_weight_versions,
    field,
    weight_version,
)
from megatron_dppo.types import FinishReason, ModelRouting, RoutedExperts

_BEYOND_LONGEST_PROMPT = 4  # SGLang cuts a response, without a word, that goes further beyond max_req_input_len


@dataclass(frozen=True)
class ServedModel:
    """Sizes of a model that requests and answers depend on."""

    vocab_size: int
    num_layers: int  # routes come for all of them, dense ones included
    end_tokens: tuple[int, ...]  # sampling any of these ends a response; may be empty
    routing: ModelRouting | None  # none for a model without experts


@dataclass(frozen=True)
class ServerFacts:
    """Version, model and limits that a server reports of itself."""

    version: str
    model_path: str
    weight_version: int
    max_prompt_tokens: int
    max_tokens: int  # of prompt and response together
    captures_routes: bool
    max_running_requests: int
    num_ranks: int  # processes that hold a part of the weights each


class Generation(Protocol):
    """Protocol adapter for servers of some versions."""

    def generate_body(self, request: Request, params: SamplingParams, model: ServedModel) -> dict[str, Any]:
        """Return the JSON of one POST to /generate."""
        ...

    def read_reply(
        self, body: object, request: Request, params: SamplingParams, model: ServedModel
    ) -> Completion:
        """Parse the body of a 200 from /generate; the tokens of a partial come before those of the body.

        Raises:
            ReplyError: Anything but the answer to this request, whole and consistent. Faults of the routes
                alone cost the completion its routes, and become its `routes_fault`.
        """
        ...

    def score_body(self, rid: str, tokens: Sequence[int], *, with_routes: bool) -> dict[str, Any]:
        """Return the JSON of one POST to /generate that asks for the log-probs of a prompt's own tokens."""
        ...

    def read_scores(
        self, body: object, tokens: Sequence[int], model: ServedModel, *, with_routes: bool
    ) -> tuple[Tensor, RoutedExperts | None]:
        """Parse [L-1] float32 log-probs of each token after the first, at temperature 1, and the routes.

        Raises:
            ReplyError: Anything but that.
            RoutingReplayError: Routes were asked for, and are faulty.
        """
        ...

    def read_facts(self, server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> ServerFacts:
        """Parse the answers to GET /server_info and GET /model_info.

        Raises:
            ServerError: The server was started with options that change what is sampled behind our back.
            ReplyError: Something is absent.
        """
        ...

    def read_load(self, body: object) -> int:
        """Parse the number of requests that run or wait from the answer to GET /v1/loads.

        Raises:
            ReplyError: It says something else.
        """
        ...


class Generation0521:
    """Adapter for SGLang 0.5.21."""

    def generate_body(self, request: Request, params: SamplingParams, model: ServedModel) -> dict[str, Any]:
        """See `Generation.generate_body`. Every sampling parameter is named: none is left to the server."""
        sampling = {
            "max_new_tokens": num_tokens_left(request, params),
            "min_new_tokens": 0,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(model.end_tokens),
            "ignore_eos": not model.end_tokens,
            "n": 1,
        }
        return {
            "rid": request.id,
            "input_ids": input_tokens(request),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.num_topk_log_probs,
            "return_routed_experts": params.capture_routes,
            "routed_experts_start_len": first_route_row(request),
            "stream": False,
        }

    def read_reply(
        self, body: object, request: Request, params: SamplingParams, model: ServedModel
    ) -> Completion:
        """See `Generation.read_reply`."""
        where = f"answer to {request.id}"
        if not isinstance(body, Mapping):
            raise ReplyError(f"{where}: found {type(body).__name__}; expected one JSON object")
        ids, meta = field(body, "output_ids", list, where), field(body, "meta_info", dict, where)
        _require(meta, {"id": request.id, "completion_tokens": len(ids)}, where)
        finish = read_finish_reason(meta, ids, num_tokens_left(request, params), model, where)
        if not ids and finish == "abort":  # while it waited: such an answer says little more
            return aborted(request)
        _require(meta, {"prompt_tokens": len(input_tokens(request))}, where)
        tokens = decode_tokens(ids, model.vocab_size, where)
        log_probs = decode_log_probs(field(meta, "output_token_logprobs", list, where), tokens, where)
        topk = None
        if params.num_topk_log_probs:
            rows, columns = field(meta, "output_top_logprobs", list, where), params.num_topk_log_probs
            topk = decode_topk(rows, tokens, log_probs, columns, model.vocab_size, where)
        num_retractions = field(meta, "num_retractions", int, where)
        routes, fault = _routes(meta, request, len(ids), params, model, where)
        completion = Completion(
            request.id,
            tokens,
            log_probs,
            finish,
            topk,
            routes,
            decode_weight_versions(field(meta, "weight_versions", list, where), len(ids), where),
            num_retractions=num_retractions,
            num_cached_tokens=field(meta, "cached_tokens", int, where),
            routes_fault=fault,
        )
        return joined(request.partial, completion) if request.partial else completion

    def score_body(self, rid: str, tokens: Sequence[int], *, with_routes: bool) -> dict[str, Any]:
        """See `Generation.score_body`. From position 0, the prompt is computed anew whatever is cached."""
        return {
            "rid": rid,
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": with_routes,
            "stream": False,
        }

    def read_scores(
        self, body: object, tokens: Sequence[int], model: ServedModel, *, with_routes: bool
    ) -> tuple[Tensor, RoutedExperts | None]:
        """See `Generation.read_scores`."""
        where = "log-probs of a prompt"
        if not isinstance(body, Mapping):
            raise ReplyError(f"{where}: found {type(body).__name__}; expected one JSON object")
        meta = field(body, "meta_info", dict, where)
        rows = field(meta, "input_token_logprobs", list, where)  # the first has no log-prob
        log_probs = decode_log_probs(rows[1:], torch.tensor(tokens[1:]), where)
        if not with_routes:
            return log_probs, None
        assert model.routing is not None, "routes are asked of models with experts only"
        routes = decode_routes(meta.get("routed_experts"), len(tokens), model.num_layers, model.routing, where)
        return log_probs, routes

    def read_facts(self, server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> ServerFacts:
        """See `Generation.read_facts`."""
        where = "/server_info"
        if server_info.get("preferred_sampling_params"):
            raise ServerError(
                f"{where}: found preferred_sampling_params {server_info['preferred_sampling_params']!r}; "
                "expected none, since sampling is ours to say. Remove it from the server's arguments."
            )
        longest = field(server_info, "max_req_input_len", int, where)
        return ServerFacts(
            version=field(server_info, "version", str, where),
            model_path=field(model_info, "model_path", str, "/model_info"),
            weight_version=weight_version(model_info.get("weight_version"), "/model_info"),
            max_prompt_tokens=longest - 1,
            max_tokens=longest + _BEYOND_LONGEST_PROMPT,
            captures_routes=server_info.get("enable_return_routed_experts") is True,
            max_running_requests=field(server_info, "max_running_requests", int, where),
            num_ranks=field(server_info, "tp_size", int, where),
        )

    def read_load(self, body: object) -> int:
        """See `Generation.read_load`."""
        where = "/v1/loads"
        if not isinstance(body, Mapping):
            raise ReplyError(f"{where}: found {type(body).__name__}; expected one JSON object")
        parts = [part for part in field(body, "loads", list, where) if isinstance(part, Mapping)]
        return sum(
            field(part, name, int, where) for part in parts for name in ("num_running_reqs", "num_waiting_reqs")
        )


GENERATIONS: Mapping[str, Generation] = MappingProxyType({"0.5.21": Generation0521()})
"""Adapters by the version that a server reports; one is added after it was run against such a server."""


def generation_of(version: object) -> Generation:
    """Return the adapter for servers that report this version.

    Raises:
        ServerError: It was never run against.
    """
    generation = GENERATIONS.get(version) if isinstance(version, str) else None
    if generation is None:
        raise ServerError(
            f"found an SGLang server of version {version!r}; expected one of {', '.join(GENERATIONS)}, which "
            "the protocol was tested with. Install one of them for sglang.python (make sglang-venv)."
        )
    return generation


def read_finish_reason(
    meta: Mapping[str, Any], ids: list[Any], limit: int, model: ServedModel, where: str
) -> FinishReason:
    """Parse the finish reason, and check it against the tokens, at most `limit` of which were asked for.

    Raises:
        ReplyError: An unknown reason, a stop without an end token, or a length that is not the limit.
    """
    reason = field(meta, "finish_reason", dict, where)
    kind = reason.get("type")
    if kind not in get_args(FinishReason):
        raise ReplyError(f"{where}: found finish_reason {reason!r:.200}; expected {get_args(FinishReason)}")
    kind = cast(FinishReason, kind)
    agrees = {
        "stop": bool(ids) and ids[-1] in model.end_tokens and len(ids) <= limit,
        "length": len(ids) == limit,
        "abort": len(ids) <= limit,
    }
    ends_early = any(token in model.end_tokens for token in ids[:-1])
    if ends_early or not agrees[kind]:
        raise ReplyError(
            f"{where}: found finish_reason {reason!r:.200} after {len(ids)} of {limit} tokens, the last of "
            f"them {ids[-1:]}; expected that to agree with the end tokens {model.end_tokens}. Check that the "
            "server and the run read the same generation_config.json."
        )
    return kind


def _require(meta: Mapping[str, Any], expected: Mapping[str, str | int], where: str) -> None:
    for name, value in expected.items():
        if field(meta, name, type(value), where) != value:
            raise ReplyError(
                f"{where}: found {name} {meta[name]!r}; expected {value!r}. The answer belongs to another "
                "request, or was cut."
            )


def _routes(
    meta: Mapping[str, Any],
    request: Request,
    num_tokens: int,
    params: SamplingParams,
    model: ServedModel,
    where: str,
) -> tuple[RoutedExperts | None, str | None]:
    """Return the routes, or a message that says why they are missing though they were asked for."""
    if not params.capture_routes:
        return None, None
    assert model.routing is not None, "routes are asked of models with experts only"
    if field(meta, "num_retractions", int, where):
        return None, f"{where}: the server retracted the request, so that its routes are recomputed ones"
    if request.partial is not None and request.partial.routed_experts is None:
        return None, f"{where}: the tokens that were sampled before have no routes"
    num_rows = len(input_tokens(request)) + num_tokens - 1 - first_route_row(request)
    try:
        payload = meta.get("routed_experts")
        return decode_routes(payload, num_rows, model.num_layers, model.routing, where), None
    except RoutingReplayError as error:
        return None, str(error)
