"""Estimates the paper's performance bound from a run's batches: the surrogate and the error terms.

`tests/support/exact_bounds.py` computes the same terms exactly on problems with enumerable responses. This module
estimates them from a mini-batch:

- The mean over the mini-batch estimates the expectation over mu.
- Advantages replace rewards. A baseline changes no term of Theorem 3.1. Subtracting the group mean scales the
  surrogate by 1 - 1/G, and `normalize_advantage_std` rescales all terms.
- xi is the largest |A| of the mini-batch, and T its longest response.

The linear term needs the mean of the total variation. |r - 1| / 2 of the sampled token is an unbiased estimate
(Eq. 10), if mu can sample every token. Binary-TV, |pi - mu| of the sampled token, has less noise, but its mean
is too small. The quadratic term needs the maximum of the total variation, which a single token cannot estimate.
It uses the largest Binary-TV, |A| and length of the mini-batch. Each is at most the true maximum, so the
quadratic term is too small. The smaller of both terms may also be too small. Nothing here is a guarantee.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.mismatch import LOG_RATIO_LIMIT
from megatron_dppo.types import Microbatch

_PER_RESPONSE = ("theory/surrogate", "theory/sum_tv", "theory/sum_tv_ratio")


@torch.no_grad()
def add_bound_of_tokens(
    metrics: Metrics,
    log_probs: Tensor,  # [T] log pi(y_t)
    rollout_log_probs: Tensor,  # [T] log mu(y_t)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add the sums over learning tokens. `add_bound_of_responses` adds the number of responses."""
    rows = loss_mask.bool().nonzero()[:, 0]
    if rows.numel() == 0:
        return
    log_pi, log_mu, advantages = (x[rows].double() for x in (log_probs, rollout_log_probs, advantages))
    ratio_less_1 = torch.expm1((log_pi - log_mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    tv = (log_pi.exp() - log_mu.exp()).abs()
    per_response = [(advantages * ratio_less_1).sum(), tv.sum(), ratio_less_1.abs().sum() / 2]
    *totals, max_tv, max_advantage = torch.stack([*per_response, tv.max(), advantages.abs().max()]).tolist()
    for name, total in zip(_PER_RESPONSE, totals, strict=True):
        metrics.add_mean(name, total, 0)
    metrics.add_max("theory/max_tv", max_tv)
    metrics.add_max("theory/max_advantage", max_advantage)


def add_bound_of_responses(metrics: Metrics, microbatches: Sequence[Microbatch]) -> None:
    """Count the responses with a learning token in a data-parallel group's complete micro-batches."""
    for microbatch in microbatches:
        lengths = [
            int(microbatch.loss_mask[start:stop].sum())
            for start, stop in pairwise(microbatch.cu_seqlens.tolist())
        ]
        for name in _PER_RESPONSE:
            metrics.add_mean(name, 0, sum(length > 0 for length in lengths))
        metrics.add_max("theory/longest_response", max(lengths))


def bound_terms(merged: Mapping[str, float]) -> dict[str, float]:
    """Return `theory/linear_term`, `quadratic_term` and `composite_term` from a step's metrics over all ranks.

    They are 4 xi times the mean over responses of the sum of TV (App. B.3), 2 xi T (T - 1) max TV^2
    (Theorem 3.2), and the smaller of both (App. B.3). Empty if no token learnt.
    """
    if "theory/sum_tv_ratio" not in merged or "theory/max_tv" not in merged:
        return {}
    horizon, max_reward = merged["theory/longest_response"], merged["theory/max_advantage"]
    linear = 4 * max_reward * merged["theory/sum_tv_ratio"]
    quadratic = 2 * max_reward * horizon * (horizon - 1) * merged["theory/max_tv"] ** 2
    return {
        "theory/linear_term": linear,
        "theory/quadratic_term": quadratic,
        "theory/composite_term": min(linear, quadratic),
    }
