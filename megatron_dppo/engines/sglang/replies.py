"""Parses responses of /generate: from bytes of JSON to numpy arrays that fit the request. Nothing is repaired.

The process that decodes responses imports this module (see `decoding_process`), so it needs no tensor library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

import msgspec
import numpy as np

from megatron_dppo.engines.sglang.topk_and_routes import (
    REPORT,
    SLACK,
    Text,
    check_topk,
    decode_flat,
    decode_routes,
)
from megatron_dppo.errors import ReplyError, RoutingReplayError
from megatron_dppo.types import (
    FinishReason,
    ModelRouting,
    RolloutTopK,
    RoutedExperts,
    Sample,
    WeightVersionSpan,
)

T = TypeVar("T")
Content = bytes | memoryview
"""Body of a response. Readers copy from it, so its memory may be overwritten afterwards."""

_OF_NUMBERS = b"0123456789+-.eE" + b"null" + b" \t\r\n"
_BEYOND_IDS = float(1 << 53)  # infinite ids are clipped to it before they become integers
_FLAT_VALUES, _FLAT_IDS = "output_top_logprobs_val_flat_b64", "output_top_logprobs_idx_flat_b64"
_TABLES = frozenset(
    {
        *("input_token_logprobs", "output_token_logprobs", "routed_experts"),
        *(_FLAT_VALUES, _FLAT_IDS),
    }
)


@dataclass(frozen=True)
class Expected:
    """Sizes of the request and the model that a response must fit."""

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


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of a prompt of L tokens."""

    log_probs: np.ndarray  # [L-1] float32, of each token after the first
    routes: np.ndarray | None = None  # [L, moe_layers, top_k] uint8 (int16 above 256 experts)


def read_scores(content: Content, expected: Expected) -> PromptScores:
    """Parse the log-probs of `expected.input_tokens`."""
    where, tokens = expected.where, expected.input_tokens
    _, meta = _ids_and_meta(_SCORED, content, where)
    table = _text(meta, "input_token_logprobs", where)
    log_probs = _decode_log_probs(table, np.array(tokens, np.int64), where)[1:]  # the first token has none
    if expected.routing is None:
        return PromptScores(log_probs)
    payload = meta.get("routed_experts")
    return PromptScores(
        log_probs, decode_routes(payload, len(tokens), expected.num_layers, expected.routing, where)
    )


Answer = Sample | PromptScores
Reader = Callable[[Content, Expected], Answer]
"""A function of this module that parses responses; the decoding process receives it by its name."""


def field(body: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    """Return `body[name]`, which must have type `kind`."""
    value = body.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = f"{value!r:.60}" if name in body else "nothing"
        raise ReplyError(f"{where}: found {found} as {name}; expected {kind.__name__}. {REPORT}")
    return value


def weight_version(text: object, where: str) -> int:
    """Parse the version number of a server's weights, which a push or the start of the server set."""
    try:
        return int(str(text))
    except ValueError:
        raise ReplyError(
            f"{where}: found weight version {text!r}; expected an integer. Start the server with "
            "megatron-dppo serve, and push weights with a version."
        ) from None


class _Scored(msgspec.Struct):
    """Fields to read from a body; the values of meta_info stay undecoded JSON."""

    meta_info: dict[str, msgspec.Raw]


class _Sampled(_Scored):
    output_ids: list[Any]


_SCORED, _SAMPLED = msgspec.json.Decoder(_Scored), msgspec.json.Decoder(_Sampled)
_ANYTHING = msgspec.json.Decoder()
_NUMBERS = msgspec.json.Decoder(list[float | None])


def read_reply(content: Content, expected: Expected) -> Sample:
    """Parse the body of a 200 from /generate, with top-K as flat base64 arrays.

    The sample's fields are numpy arrays instead of tensors. Without a token, nothing else is known of it.
    """
    where = expected.where
    ids, meta = _ids_and_meta(_SAMPLED, content, where)
    _require(meta, {"id": expected.request_id, "completion_tokens": len(ids)}, where)
    finish = _finish_reason(meta, ids, expected)
    if finish == "abort" and (not ids or "prompt_tokens" not in meta):
        # Aborted in the queue, to which a retracted request returns: such a response has few other fields, and
        # lacks its last tokens.
        return _response(expected, np.zeros(0, np.int64), np.zeros(0, np.float32), finish)
    _require(meta, {"prompt_tokens": expected.num_prompt_tokens}, where)
    tokens = _decode_tokens(ids, expected.vocab_size, where)
    log_probs = _decode_log_probs(_text(meta, "output_token_logprobs", where), tokens, where)
    topk: tuple[Any, Any] | None = None
    if expected.num_topk:
        topk = _decode_topk(meta, tokens, log_probs, expected)
    num_retractions = field(meta, "num_retractions", int, where)
    spans = cast(list[object], field(meta, "weight_versions", list, where))
    versions = _decode_weight_versions(spans, len(ids), where)
    is_of_other_weights = num_retractions > 0 and len({span.version for span in versions}) > 1
    routes, fault = _routes(meta, len(ids), expected, is_of_other_weights=is_of_other_weights)
    return _response(
        expected,
        tokens,
        log_probs,
        finish,
        topk=topk and RolloutTopK(*topk),
        routed_experts=routed_experts(routes, expected.routing),
        routes_fault=fault,
        weight_versions=versions,
        num_retractions=num_retractions,
        num_cached_tokens=field(meta, "cached_tokens", int, where),
    )


def _response(expected: Expected, tokens: Any, log_probs: Any, finish: FinishReason, **more: Any) -> Sample:
    mask: Any = np.ones(tokens.size, bool)
    return Sample(expected.request_id, "", tokens, 0, mask, log_probs, finish, **more)


def routed_experts(routes: Any, routing: ModelRouting | None) -> RoutedExperts | None:
    """Return routes `[rows, moe_layers, top_k]` with the dimensions of the model's; None without routes."""
    if routes is None or routing is None:
        return None
    return RoutedExperts(routes, routing.layer_numbers, routing.num_experts)


def _ids_and_meta(
    decoder: msgspec.json.Decoder[Any], content: Content, where: str
) -> tuple[list[Any], dict[str, Any]]:
    """Return the sampled ids and meta_info. Its large tables stay JSON text."""
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


def _finish_reason(meta: Mapping[str, Any], ids: list[Any], expected: Expected) -> FinishReason:
    """Parse the finish reason, and check it against the tokens."""
    where, limit, end_tokens = expected.where, expected.limit, expected.end_tokens
    reason = cast(dict[str, Any], field(meta, "finish_reason", dict, where))
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


def _decode_tokens(ids: Sequence[Any], vocab_size: int, where: str) -> np.ndarray:
    """Decode a list of token ids as [R] int64."""
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
        raise ReplyError(
            f"{where}: found {wrong!r:.60} as a token; expected ids from 0 to {vocab_size - 1}. {REPORT}"
        )
    return np.array(ids, dtype=np.int64)


def _decode_log_probs(payload: Text, tokens: np.ndarray, where: str) -> np.ndarray:
    """Decode the JSON of `[log_prob, token, null]` rows as [R] float32; a null log-prob becomes NaN."""
    values, ids = _columns(payload, (tokens.size,), where, "log-probs")
    if not np.array_equal(ids, tokens):
        raise ReplyError(f"{where}: the log-probs belong to other tokens than the sampled ones. {REPORT}")
    log_probs = _float32(values)
    if bool((log_probs > SLACK).any()):
        raise ReplyError(f"{where}: found a log-prob of {float(log_probs.max())}; expected at most 0. {REPORT}")
    return log_probs


def _decode_topk(
    meta: Mapping[str, Any], tokens: np.ndarray, log_probs: np.ndarray, expected: Expected
) -> tuple[np.ndarray, np.ndarray]:
    """Decode each position's most probable tokens, from base64 of [R, K] float32 and of [R, K] int32.

    Returns:
        [R, K] int32 ids and [R, K] float32 log-probs.
    """
    where, shape = expected.where, (tokens.size, expected.num_topk)
    values, ids = _text(meta, _FLAT_VALUES, where), _text(meta, _FLAT_IDS, where)
    _require(
        meta,
        {
            f"{_FLAT_VALUES}_dtype": "float32",
            f"{_FLAT_IDS}_dtype": "int32",
            "output_top_logprobs_shape": list(shape),
            "output_top_logprobs_null_prefix": 0,
        },
        where,
    )
    found = decode_flat(values, shape, "<f4", where).astype(np.float32)
    found_ids = decode_flat(ids, shape, "<i4", where)
    return check_topk(found, found_ids, tokens, log_probs, expected.vocab_size, where)


def _routes(
    meta: Mapping[str, Any], num_tokens: int, expected: Expected, *, is_of_other_weights: bool
) -> tuple[np.ndarray | None, str | None]:
    """Return the requested routes, or a message that explains why they are missing.

    A server forwards the tokens of a retracted request again, and its routes are of the last forward. They are
    kept if the weights that sampled the tokens computed them. This is certain if all tokens have one version.
    """
    where = expected.where
    if expected.routing is None:
        return None, None
    if is_of_other_weights:
        return None, f"{where}: retracted while weights changed, so its routes may come from other weights"
    if expected.lacks_earlier_routes:
        return None, f"{where}: the earlier tokens of this resumed response have no routes"
    num_rows = expected.num_prompt_tokens + num_tokens - 1 - expected.first_route_row
    try:
        payload = meta.get("routed_experts")
        return decode_routes(payload, num_rows, expected.num_layers, expected.routing, where), None
    except RoutingReplayError as error:
        return None, str(error)


def _decode_weight_versions(spans: Sequence[Any], num_tokens: int, where: str) -> tuple[WeightVersionSpan, ...]:
    """Decode the weight version of each response token from `{"version", "start", "end"}` entries."""
    decoded: list[WeightVersionSpan] = []
    for entry in spans:
        if not isinstance(entry, Mapping):
            raise ReplyError(f"{where}: found {entry!r:.60} in weight_versions; expected spans. {REPORT}")
        span = cast(Mapping[str, Any], entry)
        start, stop = field(span, "start", int, where), field(span, "end", int, where)
        decoded.append(WeightVersionSpan(start, stop, weight_version(span.get("version"), where)))
    bounds = [0, *(span.stop for span in decoded)]
    is_whole = bounds[-1] == num_tokens and all(
        span.start == start <= span.stop for span, start in zip(decoded, bounds, strict=False)
    )
    if not is_whole:
        raise ReplyError(f"{where}: weight_versions {spans!r:.200} do not cover {num_tokens} tokens. {REPORT}")
    return tuple(span for span in decoded if span.start < span.stop)


def _columns(payload: Text, shape: tuple[int, ...], where: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Decode log-probs, [*shape] float64 with NaN for null, and tokens, [*shape] int64, of each entry.

    The numbers are parsed as one flat list, which takes half the time of nested lists. The text without its
    numbers must equal the brackets of the shape.
    """
    text = bytes(payload)
    try:
        if text.translate(None, _OF_NUMBERS) != _brackets((*shape, 3)):
            raise ValueError("another shape")
        found = _NUMBERS.decode(b"[" + text.translate(None, b"[]") + b"]")
        log_probs = np.array(found[0::3], dtype=np.float64).reshape(shape)
        ids = np.array(found[1::3], dtype=np.float64).reshape(shape)
        if bool(np.isnan(ids).any()):
            raise ValueError("a token that is null")
    except (msgspec.MsgspecError, ValueError):
        raise ReplyError(
            f"{where}: found {text[:60].decode(errors='replace')} (...) as {name}, {text.count(b'[')} lists in "
            f"all; expected {shape} entries of [log-prob, token, null]. {REPORT}"
        ) from None
    return log_probs, np.clip(ids, -_BEYOND_IDS, _BEYOND_IDS).astype(np.int64)


def _brackets(shape: tuple[int, ...]) -> bytes:
    """Return the brackets and commas of nested lists of this shape: `[[,],[,]]` for (2, 2)."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        return values.astype(np.float32)
