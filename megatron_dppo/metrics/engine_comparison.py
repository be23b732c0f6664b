"""Compares single tokens between the rollout engine and the trainer, with the same weights.

`step_metrics.py` sums over tokens while a run trains. This module keeps them, so quantiles are exact, and the
two probabilities of a token can be plotted against each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms.divergence import TopKLogProbs, binary_tv, topk_partition, topk_tv
from megatron_dppo.metrics.metrics import REPORTED_QUANTILES, Metrics
from megatron_dppo.metrics.step_metrics import LOG_RATIO_LIMIT, add_mismatch
from megatron_dppo.run_folder.folder import json_number
from megatron_dppo.types import Microbatch

Routes = Literal["live", "replayed"]
"""Source of the trainer's expert choices: its own routers ("live"), or the rollout ("replayed")."""

RATIO_PERCENTS: Mapping[str, float] = {"p001": 0.1, "p01": 1.0, "p50": 50.0, "p99": 99.0, "p999": 99.9}
"""Suffix of `ratio_` -> percentile of pi / mu."""

_ROUNDING = {True: 1e-4, False: 0.02}
"""Largest mean |log pi - log mu| of two engines with the same weights, in float32 (True) and in bfloat16."""


@dataclass(frozen=True, eq=False)
class MeasuredResponse:
    """One response of R learning tokens. The mappings have an entry for each kind of routes."""

    prompt: Tensor  # [P] int64, the tokens before the first learning token
    tokens: Tensor  # [R] int64
    rollout_log_probs: Tensor  # [R] float32 log mu
    log_probs: Mapping[Routes, Tensor]  # [R] float32 log pi
    topk_tv: Mapping[Routes, Tensor]  # [R] float32; empty without the rollout's top-K


def split_responses(microbatch: Microbatch, columns: Mapping[Routes, Tensor]) -> Iterator[MeasuredResponse]:
    """Yield the responses of a micro-batch that have a learning token.

    Args:
        microbatch: Complete micro-batch of T tokens.
        columns: Log-probs [T, 1 + K] for each kind of routes, from `Actor.token_log_probs`.
    """
    m = microbatch
    log_probs: dict[Routes, Tensor] = {routes: values[:, 0] for routes, values in columns.items()}
    topk_tv: dict[Routes, Tensor] = {}
    if m.topk is not None:
        topk_tv |= {routes: _topk_tv(m, values) for routes, values in columns.items()}
    for start, stop in pairwise(m.cu_seqlens.long()):
        scored = start + m.loss_mask[start:stop].nonzero()[:, 0]
        if scored.numel():
            yield MeasuredResponse(
                prompt=m.tokens[start : scored[0] + 1].clone(),  # a view would send all tokens to other ranks
                tokens=m.targets[scored],
                rollout_log_probs=m.rollout_log_probs[scored],
                log_probs=_rows(log_probs, scored),
                topk_tv=_rows(topk_tv, scored),
            )


def _rows(values: Mapping[Routes, Tensor], rows: Tensor) -> dict[Routes, Tensor]:
    return {routes: of_routes[rows] for routes, of_routes in values.items()}


def _topk_tv(m: Microbatch, columns: Tensor) -> Tensor:
    """Return the total variation over the rollout's K tokens, the sampled one and the rest, [T]."""
    assert m.topk is not None, "called only if the rollout kept its top-K"
    topk = TopKLogProbs(m.topk.ids, m.topk.log_probs, columns[:, 1:])
    log_probs, rollout_log_probs = columns[:, 0].clamp(max=0), m.rollout_log_probs.clamp(max=0)
    num_columns = m.topk.ids.shape[1]
    return topk_tv(*topk_partition(topk, m.targets, log_probs, rollout_log_probs, top_k=num_columns))


def token_statistics(responses: Sequence[MeasuredResponse], routes: Routes) -> dict[str, float]:
    """Return statistics of the distance of pi from mu over all tokens, for one kind of routes.

    The keys are the names of `add_mismatch` without a prefix, `log_prob_diff_mean` and `_max`
    (|log pi - log mu|), and `ratio_<suffix>` for the RATIO_PERCENTS of pi / mu. With the rollout's top-K there
    are also `topk_tv_mean` and `_max`. Percentiles are exact, with linear interpolation. A NaN among the tokens
    gives NaN.
    """
    log_pi, log_mu = pairs(responses, routes)
    metrics = Metrics()
    add_mismatch(metrics, log_pi, log_mu, torch.ones_like(log_pi, dtype=torch.bool), prefix="mismatch")
    values = {name.removeprefix("mismatch/"): value for name, value in metrics.values().items()}
    if not log_pi.numel():
        return values
    log_ratio = log_pi - log_mu
    values["log_prob_diff_mean"] = float(log_ratio.abs().mean())
    values["log_prob_diff_max"] = float(log_ratio.abs().max())
    tv = binary_tv(log_pi, log_mu).numpy()
    values |= {f"tv_{suffix}": float(np.percentile(tv, 100 * q)) for suffix, q in REPORTED_QUANTILES.items()}
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().numpy()
    for suffix, quantile in zip(
        RATIO_PERCENTS, np.percentile(ratio, list(RATIO_PERCENTS.values())), strict=True
    ):
        values[f"ratio_{suffix}"] = float(quantile)
    if all(response.topk_tv for response in responses):
        topk = torch.cat([response.topk_tv[routes] for response in responses]).double()
        values |= {"topk_tv_mean": float(topk.mean()), "topk_tv_max": float(topk.max())}
    return values


def are_of_other_weights(log_probs: Tensor, rollout_log_probs: Tensor, *, is_float32: bool) -> bool:
    """Return whether trainer and engine differ as much as two different models, beyond rounding.

    The mean difference must be larger than rounding, and the mean squared difference larger than half of the
    log-probs' variance: then one engine hardly predicts the other. NaN counts as a difference.

    Args:
        log_probs: log pi of the tokens, [T].
        rollout_log_probs: log mu, [T].
        is_float32: Whether both compute in float32.
    """
    log_pi, log_mu = log_probs.double().flatten(), rollout_log_probs.double().flatten()
    difference = log_pi - log_mu
    if difference.numel() < 2:
        return False
    if not bool(difference.isfinite().all()):
        return True
    is_beyond_rounding = bool(difference.abs().mean() > _ROUNDING[is_float32])
    return is_beyond_rounding and bool(
        difference.square().mean() > 0.5 * torch.maximum(log_pi.var(), log_mu.var())
    )


def pairs(responses: Sequence[MeasuredResponse], routes: Routes) -> tuple[Tensor, Tensor]:
    """Return log pi and log mu of all tokens, [T] float64 each, in the order of the responses."""
    empty = torch.zeros(0)
    log_pi = torch.cat([empty, *(response.log_probs[routes] for response in responses)])
    log_mu = torch.cat([empty, *(response.rollout_log_probs for response in responses)])
    return log_pi.double(), log_mu.double()


def token_rows(responses: Iterable[MeasuredResponse]) -> Iterator[dict[str, object]]:
    """Yield a JSON object for each response, with lists over its tokens."""
    for response in responses:
        row: dict[str, object] = {
            "prompt": response.prompt.tolist(),
            "tokens": response.tokens.tolist(),
            "rollout_log_probs": _numbers(response.rollout_log_probs),
        }
        row |= {f"{routes}_log_probs": _numbers(values) for routes, values in response.log_probs.items()}
        row |= {f"{routes}_topk_tv": _numbers(values) for routes, values in response.topk_tv.items()}
        yield row


def _numbers(values: Tensor) -> list[float | str]:
    return [json_number(value) for value in values.tolist()]
