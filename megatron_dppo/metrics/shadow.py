"""Metrics of shadow masks: what other presets would have masked."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.mismatch import LOG_RATIO_LIMIT


@torch.no_grad()
def add_shadow_masks(
    metrics: Metrics,
    objectives: Mapping[str, Objective],
    masks: Mapping[str, Tensor],  # [T] bool each: M; those of `objectives` that could be evaluated
    active_mask: Tensor,  # [T] bool: M of the objective that trains
    *,
    log_probs: Tensor,  # [T] log pi(y_t)
    rollout_log_probs: Tensor,  # [T] log mu(y_t)
    advantages: Tensor,  # [T]
    loss_mask: Tensor,  # [T] bool
) -> None:
    """Add `shadow/<name>/*` over the learning tokens with A != 0: the tokens that a rule can drop.

    `masked_fraction`, and `masked_fraction_positive` and `_negative` over the tokens of that sign alone;
    `agreement`: the share that the objective and the active one both keep or both drop;
    `dropped_mass_fraction`: of the sum of min(pi/mu, C) |A| over all those tokens, with the objective's own C,
    the part that its mask drops. The log-ratio is clamped as in `mismatch.py`. One device synchronisation
    beside that of choosing the tokens.
    """
    if not masks:
        return
    rows = (loss_mask.bool() & (advantages != 0)).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    advantages = advantages[rows].double()
    log_ratio = (log_probs[rows].double() - rollout_log_probs[rows].double()).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    caps = torch.tensor([[objectives[name].ratio_cap] for name in masks], device=rows.device)
    mass = torch.minimum(log_ratio.exp(), caps.double()) * advantages.abs()
    is_kept = torch.stack([mask[rows] for mask in masks.values()])  # [objectives, tokens]
    is_positive = advantages > 0
    sums = torch.stack(
        [
            (~is_kept & is_positive).sum(1),
            (~is_kept & ~is_positive).sum(1),
            (is_kept == active_mask[rows]).sum(1),
            torch.where(is_kept, 0.0, mass).sum(1),
            mass.sum(1),
        ],
        dim=1,
    )
    num_tokens, num_positive = rows.numel(), float(is_positive.sum())
    for name, of_name in zip(masks, sums.tolist(), strict=True):
        positive, negative, agreeing, dropped_mass, whole_mass = of_name
        metrics.add_mean(f"shadow/{name}/masked_fraction", positive + negative, num_tokens)
        metrics.add_mean(f"shadow/{name}/masked_fraction_positive", positive, num_positive)
        metrics.add_mean(f"shadow/{name}/masked_fraction_negative", negative, num_tokens - num_positive)
        metrics.add_mean(f"shadow/{name}/agreement", agreeing, num_tokens)
        metrics.add_mean(f"shadow/{name}/dropped_mass_fraction", dropped_mass, whole_mass)
