"""Decodes the arrays of an answer from JSON to tensors; refuses those that do not fit, never fills them in."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.errors import ReplyError, RoutingReplayError
from megatron_dppo.types import ModelRouting, RolloutTopK, RoutedExperts, WeightVersionSpan

T = TypeVar("T")

_REPORT = "The server is not the one it says it is, or a proxy changed its answer: look at its log."
_NO_ROUTES = "Check that the server serves the model being trained, or set rollout.routing_replay = 'off'."
_SLACK = 1e-3  # between two reports of one log-prob


def field(body: Mapping[str, Any], name: str, kind: type[T], where: str) -> T:
    """Return `body[name]`, which must be a `kind`.

    Raises:
        ReplyError: It is absent or something else.
    """
    value = body.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = f"{value!r:.60}" if name in body else "nothing"
        raise ReplyError(f"{where}: found {found} as {name}; expected {kind.__name__}. {_REPORT}")
    return value


def decode_tokens(ids: Sequence[Any], vocab_size: int, where: str) -> Tensor:
    """Decode a list of token ids as [R] int64."""
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocab_size)
        raise ReplyError(
            f"{where}: found {wrong!r:.60} as a token; expected ids from 0 to {vocab_size - 1}. {_REPORT}"
        )
    return torch.tensor(ids, dtype=torch.int64)


def decode_log_probs(rows: Sequence[Any], tokens: Tensor, where: str) -> Tensor:
    """Decode `[log_prob, token, text]` rows as [R] float32; a null log-prob becomes NaN.

    Raises:
        ReplyError: Other rows than one per token, of other tokens, or a log-prob above 0.
    """
    table = _table(rows, (tokens.numel(),), where, "output_token_logprobs")
    if not torch.equal(table[:, 1].to(torch.int64), tokens):
        raise ReplyError(f"{where}: the log-probs are of other tokens than those sampled. {_REPORT}")
    log_probs = table[:, 0].to(torch.float32)
    if bool((log_probs > _SLACK).any()):
        raise ReplyError(
            f"{where}: found a log-prob of {float(log_probs.max())}; expected at most 0. {_REPORT}"
        )
    return log_probs


def decode_topk(
    rows: Sequence[Any], tokens: Tensor, log_probs: Tensor, num_columns: int, vocab_size: int, where: str
) -> RolloutTopK:
    """Decode each position's most probable tokens from rows of `[log_prob, token, text]` entries.

    Args:
        rows: `output_top_logprobs`.
        tokens: [R] int64, the sampled ones.
        log_probs: [R] float32, of the sampled ones.
        num_columns: K.
        vocab_size: Ids are below it.
        where: Names the answer in errors.

    Raises:
        ReplyError: Another shape, an id that does not exist or stands twice, columns out of order, or a sampled
            token with another log-prob here than by itself: rows that are shifted.
    """
    table = _table(rows, (tokens.numel(), num_columns), where, "output_top_logprobs")
    ids, values = table[..., 1].to(torch.int32), table[..., 0].to(torch.float32)
    faults = {
        f"token ids outside of 0 to {vocab_size - 1}": (ids < 0) | (ids >= vocab_size),
        "a token twice in a row": ids.sort(dim=-1).values.diff(dim=-1) == 0,
        "log-probs that are no numbers": values.isnan(),
        "log-probs that rise along a row": values.diff(dim=-1) > _SLACK,
        "another log-prob of the sampled token": (ids == tokens[:, None])
        & ((values - log_probs[:, None]).abs() > _SLACK),
    }
    for fault, is_so in faults.items():
        if bool(is_so.any()):
            raise ReplyError(f"{where}: output_top_logprobs holds {fault}. {_REPORT}")
    return RolloutTopK(ids, values)


def decode_routes(
    payload: object, num_rows: int, num_layers: int, routing: ModelRouting, where: str
) -> RoutedExperts:
    """Decode the MoE layers' routes from base64 int32 [rows, layers, top_k], little-endian.

    Args:
        payload: `routed_experts`.
        num_rows: Tokens that were forwarded: all but the last.
        num_layers: All hidden layers; the server's array has rows for dense ones too.
        routing: What the model's routes look like.
        where: Names the answer in errors.

    Raises:
        RoutingReplayError: Not such an array, a dense layer with routes, an expert that does not exist or
            stands twice in a row, or nothing but zeros.
    """
    if not isinstance(payload, str):
        raise RoutingReplayError(
            f"{where}: found no routed_experts; expected them. Start the server with "
            "enable_return_routed_experts = true, or set rollout.routing_replay = 'off'."
        )
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutingReplayError(f"{where}: routed_experts is no base64 ({error}). {_NO_ROUTES}") from None
    expected = (num_rows, num_layers, routing.top_k)
    if len(data) != 4 * num_rows * num_layers * routing.top_k:
        raise RoutingReplayError(
            f"{where}: found {len(data)} bytes of routed_experts; expected int32 {expected} (rows, layers, "
            f"experts per token). {_NO_ROUTES}"
        )
    routes = torch.from_numpy(np.frombuffer(data, "<i4").reshape(expected).astype(np.int64))
    is_moe = torch.zeros(num_layers, dtype=torch.bool)
    is_moe[list(routing.layer_numbers)] = True
    if bool(routes[:, ~is_moe].any()):
        raise RoutingReplayError(f"{where}: routed_experts names experts in dense layers. {_NO_ROUTES}")
    indices = routes[:, is_moe]
    faults = {
        f"experts outside of 0 to {routing.num_experts - 1}": (indices < 0) | (indices >= routing.num_experts),
        "an expert twice for one token": indices.sort(dim=-1).values.diff(dim=-1) == 0,
        "nothing but zeros: nothing was captured": ~indices.any() & torch.tensor(routing.num_experts > 1),
    }
    for fault, is_so in faults.items():
        if num_rows and bool(is_so.any()):
            raise RoutingReplayError(f"{where}: routed_experts holds {fault}. {_NO_ROUTES}")
    dtype = torch.uint8 if routing.num_experts <= 256 else torch.int16
    return RoutedExperts(indices.to(dtype), routing.layer_numbers, routing.num_experts)


def decode_weight_versions(spans: Sequence[Any], num_tokens: int, where: str) -> tuple[WeightVersionSpan, ...]:
    """Decode the weight version of each response token from `{"version", "start", "end"}` entries.

    Raises:
        ReplyError: They leave tokens out, overlap, or name a version that is no number.
    """
    decoded: list[WeightVersionSpan] = []
    for span in spans:
        if not isinstance(span, Mapping):
            raise ReplyError(f"{where}: found {span!r:.60} in weight_versions; expected spans. {_REPORT}")
        start, stop = field(span, "start", int, where), field(span, "end", int, where)
        decoded.append(WeightVersionSpan(start, stop, weight_version(span.get("version"), where)))
    bounds = [0, *(span.stop for span in decoded)]
    is_whole = bounds[-1] == num_tokens and all(
        span.start == start <= span.stop for span, start in zip(decoded, bounds, strict=False)
    )
    if not is_whole:
        raise ReplyError(f"{where}: weight_versions {spans!r:.200} do not cover {num_tokens} tokens. {_REPORT}")
    return tuple(span for span in decoded if span.start < span.stop)


def weight_version(text: object, where: str) -> int:
    """Return the version number that weights were given when they were pushed, or at start-up."""
    try:
        return int(str(text))
    except ValueError:
        raise ReplyError(
            f"{where}: found weight version {text!r}; expected a whole number. Start the server with "
            "megatron-dppo serve, and push weights with a version."
        ) from None


def _table(rows: Sequence[Any], shape: tuple[int, ...], where: str, name: str) -> Tensor:
    """Decode the log-prob and token of each entry as [*shape, 2] float64; null becomes NaN."""
    try:
        table = np.array(rows, dtype=object).reshape(*shape, 3) if rows else np.zeros((*shape, 3), dtype=object)
        found = table[..., :2].astype(np.float64)
    except (TypeError, ValueError):
        found = None
    if found is None or (not rows and 0 not in shape) or bool(np.isnan(found[..., 1]).any()):
        raise ReplyError(
            f"{where}: found {len(rows)} rows of {name} that are no {shape} entries of [log-prob, token, "
            f"text]; expected those. {_REPORT}"
        )
    return torch.from_numpy(found)
