"""Builds the requests to an SGLang server and parses its responses, with an adapter per server version.

The version that a server reports selects the adapter. Versions that the package was never run against are
refused. Every response is checked against its request before it is used. Large responses are checked in a
separate process (`decoding_process`).
"""

# PyTorch does not annotate from_numpy.
# pyright: reportUnknownMemberType=false
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.engines.base import (
    Request,
    SamplingParams,
    first_route_row,
    give_up,
    input_tokens,
    join_parts,
    num_tokens_left,
)
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess
from megatron_dppo.engines.sglang.replies import (
    Expected,
    PromptScores,
    field,
    read_reply,
    read_scores,
    routed_experts,
    weight_version,
)
from megatron_dppo.engines.sglang.sampling_settings import (
    reported_problems,
    sampling_parameters,
    seed_of,
)
from megatron_dppo.errors import ReplyError, ServerError
from megatron_dppo.types import ModelRouting, RoutedExperts, Sample

_BEYOND_LONGEST_PROMPT = 4  # SGLang silently truncates responses further beyond max_req_input_len
_MOST_BYTES = 1 << 22  # of a response without tokens
_TOKEN_BYTES, _TOPK_BYTES, _ROUTES_BYTES = 1 << 10, 1 << 7, 1 << 14  # per token; at most 2,048 chosen experts


@dataclass(frozen=True)
class ServedModel:
    """Sizes of a model that requests and responses depend on."""

    vocab_size: int
    num_layers: int  # routes cover all of them, dense ones included
    end_tokens: tuple[int, ...]  # tokens that end a response; may be empty
    routing: ModelRouting | None  # None for a model without experts


@dataclass(frozen=True)
class ServerFacts:
    """Version, model and limits that a server reports."""

    version: str
    model_path: str
    weight_version: int
    max_prompt_tokens: int
    max_tokens: int  # limit of prompt and response together
    captures_routes: bool
    max_running_requests: int
    num_ranks: int  # processes that each have a part of the weights


class Generation:
    """Protocol adapter of SGLang 0.5.22 and 0.5.23; those of other versions override what differs."""

    def __init__(self, decoding: DecodingProcess) -> None:
        """Keep the process that decodes large responses."""
        self._decoding = decoding

    def generate_body(self, request: Request, params: SamplingParams, model: ServedModel) -> dict[str, Any]:
        """Return the JSON body of one POST to /generate, with every sampling parameter: no default applies."""
        sampling = sampling_parameters(
            num_tokens=num_tokens_left(request, params),
            temperature=params.temperature,
            top_p=params.top_p,
            end_tokens=model.end_tokens,
            seed=seed_of(request.noise_key),
        )
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": input_tokens(request).tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": params.num_topk_log_probs,
            "return_routed_experts": params.capture_routes,
            "routed_experts_start_len": first_route_row(request),
            "stream": False,
        }
        if params.num_topk_log_probs:  # as two flat arrays
            body["return_flat_raw_output_top_logprobs"] = body["return_flat_raw_top_logprobs_b64"] = True
        return body

    async def read_reply(
        self, content: bytes, request: Request, params: SamplingParams, model: ServedModel
    ) -> Sample:
        """Parse the body of a 200 from /generate, and append its tokens to the request's earlier tokens."""
        assert model.routing is not None or not params.capture_routes, "only models with experts return routes"
        partial = request.partial
        expected = Expected(
            where=f"response to {request.id}",
            request_id=request.id,
            num_prompt_tokens=len(input_tokens(request)),
            limit=num_tokens_left(request, params),
            num_topk=params.num_topk_log_probs,
            vocab_size=model.vocab_size,
            end_tokens=model.end_tokens,
            num_layers=model.num_layers,
            routing=model.routing if params.capture_routes else None,
            first_route_row=first_route_row(request),
            lacks_earlier_routes=partial is not None and partial.routed_experts is None,
        )
        reply = await self._decoding.read(read_reply, content, expected)
        assert isinstance(reply, Sample), "each reader returns its own type"
        response: Sample = _as_tensors(reply)
        if not response.tokens.numel():
            return give_up(request)
        return join_parts(partial, response) if partial else response

    def score_body(self, rid: str, tokens: Sequence[int], *, with_routes: bool) -> dict[str, Any]:
        """Return the JSON body of one POST to /generate that requests the log-probs of a prompt's tokens.

        A server ignores its prefix cache if logprob_start_len = 0.
        """
        sampling = sampling_parameters(num_tokens=1, temperature=1.0, top_p=1.0, end_tokens=(), seed=0)
        return {
            "rid": rid,
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": with_routes,
            "stream": False,
        }

    async def read_scores(
        self, content: bytes, tokens: Sequence[int], model: ServedModel, *, with_routes: bool
    ) -> tuple[Tensor, RoutedExperts | None]:
        """Parse [L-1] float32 log-probs of each token after the first, at temperature 1, and the routes."""
        assert model.routing is not None or not with_routes, "only models with experts return routes"
        expected = Expected(
            where="log-probs of a prompt",
            input_tokens=tuple(tokens),
            num_layers=model.num_layers,
            routing=model.routing if with_routes else None,
        )
        scores = await self._decoding.read(read_scores, content, expected)
        assert isinstance(scores, PromptScores), "each reader returns its own type"
        return _as_tensors(scores.log_probs), _as_tensors(routed_experts(scores.routes, model.routing))

    def read_facts(self, server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> ServerFacts:
        """Parse the responses to GET /server_info and GET /model_info."""
        where = "/server_info"
        problems = list(reported_problems(server_info))
        if problems:
            raise ServerError("\n".join(map(str, problems)))
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
        """Parse the number of running and waiting requests from the response to GET /v1/loads."""
        where = "/v1/loads"
        if not isinstance(body, Mapping):
            raise ReplyError(f"{where}: found {type(body).__name__}; expected one JSON object")
        loads = cast(list[object], field(cast(Mapping[str, Any], body), "loads", list, where))
        parts = [cast(Mapping[str, Any], part) for part in loads if isinstance(part, Mapping)]
        return sum(
            field(part, name, int, where) for part in parts for name in ("num_running_reqs", "num_waiting_reqs")
        )


_DECODING = DecodingProcess()
GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {
        "0.5.22": Generation(_DECODING),
        "0.5.23": Generation(_DECODING),
    }
)
"""Adapters by the version that a server reports, oldest first.

Add a version after its adapter was run against such a server. All engines of this process share the decoding
process, which starts with the first large response.
"""
NEWEST = next(reversed(GENERATIONS))
"""The version that `make sglang-venv` installs."""


def most_bytes(body: Mapping[str, Any]) -> int:
    """Return the largest size of the response to a POST of this body: several times what SGLang writes.

    An endless response takes no more memory than that. Only calls of /generate have tokens.
    """
    if "input_ids" not in body:
        return _MOST_BYTES
    per_token = _TOKEN_BYTES + _TOPK_BYTES * body.get("top_logprobs_num", 0)
    per_token += _ROUTES_BYTES if body["return_routed_experts"] else 0
    return _MOST_BYTES + per_token * (len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"])


def generation_of(version: object) -> Generation:
    """Return the adapter for servers that report this version."""
    generation = GENERATIONS.get(version) if isinstance(version, str) else None
    if generation is None:
        raise ServerError(
            f"found an SGLang server of version {version!r}; expected one of {', '.join(GENERATIONS)}, which "
            "the protocol was tested with. Install one of them for sglang.python (make sglang-venv)."
        )
    return generation


def _as_tensors(value: Any) -> Any:
    """Return an array as a tensor that shares its memory, and a record with its arrays as tensors."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _as_tensors(getattr(value, each.name)) for each in fields(value)})
    return value
