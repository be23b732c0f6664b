"""Parses responses of /generate: from bytes of JSON to checked numpy arrays.

The process that decodes responses imports this module (see `decoding_process`), so it needs no tensor library.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self, cast, get_args

import msgspec
import numpy as np

from megatron_dppo.engines.sglang.decoding import (
    decode_flat_topk,
    decode_log_probs,
    decode_routes,
    decode_tokens,
    decode_topk,
    decode_weight_versions,
    field,
)
from megatron_dppo.errors import ReplyError, RoutingReplayError
from megatron_dppo.types import FinishReason, ModelRouting

Content = bytes | memoryview
"""Body of a response. Readers copy from it, so its memory may be overwritten afterwards."""


@dataclass(frozen=True)
class Expected:
    """Sizes of the request and the model that a response must fit, in types that JSON supports."""

    where: str  # name of the response in errors
    request_id: str = ""
    input_tokens: tuple[int, ...] = ()  # prompt tokens, if their log-probs are requested
    num_prompt_tokens: int = 0
    limit: int = 0  # largest number of response tokens
    num_topk: int = 0  # K; 0 means no top-K
    vocab_size: int = 0
    end_tokens: tuple[int, ...] = ()
    num_layers: int = 0
    routing: ModelRouting | None = None  # None if no routes are requested
    first_route_row: int = 0
    lacks_earlier_routes: bool = False  # the earlier tokens of a resumed response have no routes

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build the record from the fields of `dataclasses.asdict` after a round trip through JSON."""
        routing = fields["routing"]
        if routing is not None:
            routing = ModelRouting(**(routing | {"layer_numbers": tuple(routing["layer_numbers"])}))
        tuples = {name: tuple(fields[name]) for name in ("input_tokens", "end_tokens")}
        return cls(**{**fields, **tuples, "routing": routing})


@dataclass(frozen=True)
class Reply:
    """Parsed response to a request: R tokens, K top-K columns."""

    finish_reason: FinishReason
    tokens: np.ndarray  # [R] int64; if R = 0, nothing else is known
    log_probs: np.ndarray  # [R] float32
    topk_ids: np.ndarray | None = None  # [R, K] int32
    topk_log_probs: np.ndarray | None = None  # [R, K] float32
    routes: np.ndarray | None = None  # [rows, moe_layers, top_k] uint8 (int16 above 256 experts)
    routes_fault: str | None = None  # why the requested routes are missing
    weight_versions: tuple[tuple[int, int, int], ...] = ()  # start, stop, version
    num_retractions: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of a prompt of L tokens."""

    log_probs: np.ndarray  # [L-1] float32, of each token after the first
    routes: np.ndarray | None = None  # [L, moe_layers, top_k] uint8 (int16 above 256 experts)


def read_reply_0521(content: Content, expected: Expected) -> Reply:
    """Parse the body of a 200 from /generate of SGLang 0.5.21.

    Raises:
        ReplyError: The body is not a complete and consistent response to the request. If only the routes are
            faulty, the reply has a `routes_fault` instead.
    """
    return _read_reply(content, expected, _nested_topk)


def read_reply_0522(content: Content, expected: Expected) -> Reply:
    """Parse the body of a 200 from /generate of SGLang 0.5.22 or later, with top-K as flat base64 arrays.

    Raises:
        ReplyError: See `read_reply_0521`; also if the top-K has another form than requested.
    """
    return _read_reply(content, expected, _flat_topk)


def _read_reply(content: Content, expected: Expected, read_topk: "_ReadTopK") -> Reply:
    where = expected.where
    ids, meta = _ids_and_meta(_SAMPLED, content, where)
    _require(meta, {"id": expected.request_id, "completion_tokens": len(ids)}, where)
    finish = _finish_reason(meta, ids, expected)
    if not ids and finish == "abort":  # aborted in the queue: such a response has few other fields
        return Reply(finish, np.zeros(0, np.int64), np.zeros(0, np.float32))
    _require(meta, {"prompt_tokens": expected.num_prompt_tokens}, where)
    tokens = decode_tokens(ids, expected.vocab_size, where)
    log_probs = decode_log_probs(_text(meta, "output_token_logprobs", where), tokens, where)
    topk_ids = topk_log_probs = None
    if expected.num_topk:
        topk_ids, topk_log_probs = read_topk(meta, tokens, log_probs, expected)
    num_retractions = field(meta, "num_retractions", int, where)
    routes, fault = _routes(meta, len(ids), num_retractions, expected)
    spans = decode_weight_versions(field(meta, "weight_versions", list, where), len(ids), where)
    return Reply(
        finish,
        tokens,
        log_probs,
        topk_ids,
        topk_log_probs,
        routes,
        fault,
        tuple((span.start, span.stop, span.version) for span in spans),
        num_retractions,
        num_cached_tokens=field(meta, "cached_tokens", int, where),
    )


def read_scores_0521(content: Content, expected: Expected) -> PromptScores:
    """Parse the log-probs of `expected.input_tokens` from SGLang 0.5.21.

    Raises:
        ReplyError: The body has no such log-probs.
        RoutingReplayError: The requested routes are faulty.
    """
    where, tokens = expected.where, expected.input_tokens
    _, meta = _ids_and_meta(_SCORED, content, where)
    table = _text(meta, "input_token_logprobs", where)
    log_probs = decode_log_probs(table, np.array(tokens, np.int64), where)[1:]  # the first token has none
    if expected.routing is None:
        return PromptScores(log_probs)
    payload = meta.get("routed_experts")
    return PromptScores(
        log_probs, decode_routes(payload, len(tokens), expected.num_layers, expected.routing, where)
    )


Answer = Reply | PromptScores

READERS: Mapping[str, Callable[[Content, Expected], Answer]] = MappingProxyType(
    {
        "reply 0.5.21": read_reply_0521,
        "reply 0.5.22": read_reply_0522,
        "scores 0.5.21": read_scores_0521,
    }
)
"""Functions that parse responses, by the names that the adapters in `protocol` use."""


class _Scored(msgspec.Struct):
    """Fields to read from a body; the values of meta_info stay undecoded JSON."""

    meta_info: dict[str, msgspec.Raw]


class _Sampled(_Scored):
    output_ids: list[Any]


_FLAT_VALUES, _FLAT_IDS = "output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"
_TABLES = frozenset(
    {
        *("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "routed_experts"),
        *(_FLAT_VALUES, _FLAT_IDS),
    }
)
_SCORED, _SAMPLED = msgspec.json.Decoder(_Scored), msgspec.json.Decoder(_Sampled)
_ANYTHING = msgspec.json.Decoder()


def _ids_and_meta(
    decoder: msgspec.json.Decoder[Any], content: Content, where: str
) -> tuple[list[Any], dict[str, Any]]:
    """Return the sampled ids and meta_info. Its large tables stay JSON text, which `decoding` parses."""
    try:
        body = decoder.decode(content)
        meta = {
            name: value if name in _TABLES else _ANYTHING.decode(value)
            for name, value in body.meta_info.items()
        }
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ReplyError(
            f"{where}: found no JSON of a response ({error}); expected one JSON object with "
            f"{' and '.join(decoder.type.__struct_fields__)}"
        ) from None
    return getattr(body, "output_ids", []), meta


def _text(meta: Mapping[str, Any], name: str, where: str) -> msgspec.Raw:
    return field(meta, name, msgspec.Raw, where)


_ReadTopK = Callable[[Mapping[str, Any], np.ndarray, np.ndarray, Expected], tuple[np.ndarray, np.ndarray]]


def _nested_topk(
    meta: Mapping[str, Any], tokens: np.ndarray, log_probs: np.ndarray, expected: Expected
) -> tuple[np.ndarray, np.ndarray]:
    table = _text(meta, "output_top_logprobs", expected.where)
    return decode_topk(table, tokens, log_probs, expected.num_topk, expected.vocab_size, expected.where)


def _flat_topk(
    meta: Mapping[str, Any], tokens: np.ndarray, log_probs: np.ndarray, expected: Expected
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the two arrays, after a check of the types and the shape that the response reports."""
    where, size, vocab_size = expected.where, expected.num_topk, expected.vocab_size
    values, ids = _text(meta, _FLAT_VALUES, where), _text(meta, _FLAT_IDS, where)
    _require(
        meta,
        {
            f"{_FLAT_VALUES}_dtype": "float32",
            f"{_FLAT_IDS}_dtype": "int32",
            "output_top_logprobs_shape": [len(tokens), size],
            "output_top_logprobs_null_prefix": 0,
        },
        where,
    )
    return decode_flat_topk(values, ids, tokens, log_probs, size, vocab_size, where)


def _finish_reason(meta: Mapping[str, Any], ids: list[Any], expected: Expected) -> FinishReason:
    """Parse the finish reason, and check it against the tokens.

    Raises:
        ReplyError: Unknown reason, "stop" without an end token, or "length" with another length than the limit.
    """
    where, limit, end_tokens = expected.where, expected.limit, expected.end_tokens
    reason = field(meta, "finish_reason", dict, where)
    kind = reason.get("type")
    if kind not in get_args(FinishReason):
        raise ReplyError(f"{where}: found finish_reason {reason!r:.200}; expected {get_args(FinishReason)}")
    kind = cast(FinishReason, kind)
    agrees = {
        "stop": bool(ids) and ids[-1] in end_tokens and len(ids) <= limit,
        "length": len(ids) == limit,
        "abort": len(ids) <= limit,
    }
    ends_early = any(token in end_tokens for token in ids[:-1])
    if ends_early or not agrees[kind]:
        raise ReplyError(
            f"{where}: found finish_reason {reason!r:.200} after {len(ids)} of {limit} tokens, the last "
            f"one {ids[-1:]}; expected it to agree with the end tokens {end_tokens}. Check that the "
            "server and the run read the same generation_config.json."
        )
    return kind


def _require(meta: Mapping[str, Any], expected: Mapping[str, str | int | list[int]], where: str) -> None:
    for name, value in expected.items():
        if field(meta, name, type(value), where) != value:
            raise ReplyError(
                f"{where}: found {name} {meta[name]!r}; expected {value!r}. The response is for another "
                "request, or was truncated."
            )


def _routes(
    meta: Mapping[str, Any], num_tokens: int, num_retractions: int, expected: Expected
) -> tuple[np.ndarray | None, str | None]:
    """Return the requested routes, or a message that explains why they are missing."""
    where = expected.where
    if expected.routing is None:
        return None, None
    if num_retractions:
        return None, f"{where}: the server retracted the request, so its routes come from a recomputation"
    if expected.lacks_earlier_routes:
        return None, f"{where}: the earlier tokens of this resumed response have no routes"
    num_rows = expected.num_prompt_tokens + num_tokens - 1 - expected.first_route_row
    try:
        payload = meta.get("routed_experts")
        return decode_routes(payload, num_rows, expected.num_layers, expected.routing, where), None
    except RoutingReplayError as error:
        return None, str(error)
