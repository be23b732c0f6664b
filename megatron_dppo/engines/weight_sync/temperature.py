"""Tests whether servers return log-probs at the temperature that they sample at.

A server that was started outside this package may return log-probs at temperature 1 instead, and does not
report it (SGLANG_RETURN_ORIGINAL_LOGPROB). At temperature 2 the differences between log-probs are half as large
as at temperature 1, so two requests are enough.
"""

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import SglangClient, new_rid
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.errors import WeightSyncError

_TEMPERATURE, _MOST_TOKENS, _FLAT = 2.0, 20, 1e-6


def require_temperature(urls: Sequence[str], model: ServedModel, api_key: str | None) -> None:
    """Require that servers return log-probs at the request's temperature; samples two tokens from each server.

    Raises:
        ServerError: A server does not reply.
        WeightSyncError: A server returns log-probs without the temperature.
    """
    for url in urls:
        slope = asyncio.run(_slope(url, model, api_key))
        if slope is not None and slope > (1 + 1 / _TEMPERATURE) / 2:
            raise WeightSyncError(
                f"{url}: found log-probs at temperature {_TEMPERATURE:g} that lie {slope:.3g} times as far "
                f"apart as at 1; expected {1 / _TEMPERATURE:g} times. They lack the temperature: start this "
                "server without SGLANG_RETURN_ORIGINAL_LOGPROB."
            )


async def _slope(url: str, model: ServedModel, api_key: str | None) -> float | None:
    """Return the ratio of log-prob differences at `_TEMPERATURE` to those at 1, or None if all are equal."""
    async with SglangClient(url, api_key=api_key) as client:
        generation, _ = await client.connect()

        async def log_probs(temperature: float) -> dict[int, float]:
            num_topk = min(_MOST_TOKENS, model.vocab_size)
            params = SamplingParams(1, temperature=temperature, num_topk_log_probs=num_topk)
            request = Request(new_rid("temperature"), (min(1, model.vocab_size - 1),), (0, 0, 0))
            content = await client.generate(generation.generate_body(request, params, model))
            topk = (await generation.read_reply(content, request, params, model)).topk
            assert topk is not None, "asked for"
            return dict(zip(topk.ids[0].tolist(), topk.log_probs[0].tolist(), strict=True))

        plain, scaled = await log_probs(1.0), await log_probs(_TEMPERATURE)
    shared = sorted(plain.keys() & scaled.keys())
    plain_of, scaled_of = (_centred([found[token] for token in shared]) for found in (plain, scaled))
    norm = float(plain_of @ plain_of)
    return float(plain_of @ scaled_of) / norm if norm > _FLAT else None


def _centred(values: Sequence[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor - tensor.mean()
