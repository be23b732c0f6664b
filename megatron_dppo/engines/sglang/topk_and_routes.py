"""Decodes the top-K and the routes of a response from base64, and checks them. Nothing is repaired.

The process that decodes responses imports this module, so it needs no tensor library.
"""

import contextlib
from itertools import combinations

import msgspec
import numpy as np
import pybase64

from megatron_dppo.errors import ReplyError, RoutingReplayError
from megatron_dppo.types import ModelRouting

Text = msgspec.Raw | bytes
"""JSON that is not parsed yet."""
REPORT = "The server is not the version that it reports, or a proxy changed its response: look at its log."
SLACK = 1e-3
"""Largest difference between two reports of one log-prob."""

_NO_ROUTES = "Check that the server serves the model being trained, or set rollout.routing_replay = 'off'."
_BASE64 = msgspec.json.Decoder(bytes | None)


def decode_flat(payload: Text, shape: tuple[int, int], dtype: str, where: str) -> np.ndarray:
    """Decode base64 of one of the two top-K arrays, [R, K] of 4 bytes each."""
    try:
        data = _decode_base64(payload) or b""
    except msgspec.MsgspecError as error:
        raise ReplyError(f"{where}: output_top_logprobs is not base64 ({error}). {REPORT}") from None
    if len(data) != 4 * shape[0] * shape[1]:
        raise ReplyError(
            f"{where}: found {len(data)} bytes of output_top_logprobs; expected {shape} of 4 bytes each. "
            f"{REPORT}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def check_topk(
    values: np.ndarray,
    found_ids: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    vocab_size: int,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Check a top-K against the sampled tokens, and return it as [R, K] int32 ids and [R, K] float32 log-probs.

    Args:
        values: [R, K] float32 log-probs, as received.
        found_ids: [R, K] token ids, as received.
        tokens: [R] int64 sampled tokens.
        log_probs: [R] float32 log-probs of the sampled tokens.
        vocab_size: Vocabulary size; ids must be below it.
        where: Name of the response in errors.
    """
    is_outside = (found_ids < 0) | (found_ids >= vocab_size)
    ids = np.where(is_outside, -1, found_ids).astype(np.int32)
    with np.errstate(invalid="ignore"):  # the difference of two -inf
        faults = {
            f"token ids outside of 0 to {vocab_size - 1}": is_outside,
            "a token twice in a row": np.diff(np.sort(ids)) == 0,
            "log-probs that are NaN": np.isnan(values),
            "log-probs that rise along a row": np.diff(values) > SLACK,
            "another log-prob of the sampled token": (ids == tokens[:, None])
            & (np.abs(values - log_probs[:, None]) > SLACK),
        }
    for fault, is_so in faults.items():
        if bool(is_so.any()):
            raise ReplyError(f"{where}: output_top_logprobs holds {fault}. {REPORT}")
    return ids, values


def decode_routes(
    payload: Text | None, num_rows: int, num_layers: int, routing: ModelRouting, where: str
) -> np.ndarray:
    """Decode the MoE layers' routes from base64 int32 [rows, layers, top_k], little-endian.

    Args:
        payload: The JSON of `routed_experts`, a string; None if the response lacks it.
        num_rows: Number of forwarded tokens: all but the last.
        num_layers: Number of all hidden layers; the server's array includes dense ones.
        routing: MoE layers, number of experts and top_k of the model.
        where: Name of the response in errors.

    Returns:
        [rows, moe_layers, top_k] uint8; int16 above 256 experts.
    """
    try:
        data = None if payload is None else _decode_base64(payload)
    except msgspec.MsgspecError as error:
        raise RoutingReplayError(f"{where}: routed_experts is not base64 ({error}). {_NO_ROUTES}") from None
    if data is None:
        raise RoutingReplayError(
            f"{where}: found no routed_experts; expected the routes. Start the server with "
            "enable_return_routed_experts = true, or set rollout.routing_replay = 'off'."
        )
    expected = (num_rows, num_layers, routing.top_k)
    if len(data) != 4 * num_rows * num_layers * routing.top_k:
        raise RoutingReplayError(
            f"{where}: found {len(data)} bytes of routed_experts; expected int32 {expected} (rows, layers, "
            f"experts per token). {_NO_ROUTES}"
        )
    routes = np.frombuffer(data, "<i4").reshape(expected)
    layers = list(routing.layer_numbers)
    if bool(np.delete(routes, layers, axis=1).any()):
        raise RoutingReplayError(f"{where}: routed_experts names experts in dense layers. {_NO_ROUTES}")
    found = routes if layers == list(range(num_layers)) else routes[:, sorted(layers)]
    if num_rows and not (found.min() >= 0 and found.max() < routing.num_experts):
        wrong = f"experts outside of 0 to {routing.num_experts - 1}"
        raise RoutingReplayError(f"{where}: routed_experts holds {wrong}. {_NO_ROUTES}")
    indices = found.astype(np.uint8 if routing.num_experts <= 256 else np.int16)
    columns = np.ascontiguousarray(indices.reshape(-1, routing.top_k).T)
    faults = {
        "an expert twice for one token": any(bool((a == b).any()) for a, b in combinations(columns, 2)),
        "only zeros: nothing was captured": routing.num_experts > 1 and not indices.any(),
    }
    for fault, is_so in faults.items():
        if num_rows and is_so:
            raise RoutingReplayError(f"{where}: routed_experts holds {fault}. {_NO_ROUTES}")
    return indices


def _decode_base64(payload: Text) -> bytes | None:
    """Decode a JSON string of base64; null becomes None."""
    text = memoryview(payload)
    if bytes(text[:1]) == b'"':
        with contextlib.suppress(ValueError):  # it is not base64, or JSON has escaped a slash
            return pybase64.b64decode(text[1:-1], validate=True)
    return _BASE64.decode(payload)
