"""Which tokens may learn: the mask M of the policy gradient (Eq. 12 and its competitors).

A rule only ever drops a token whose update would push the policy further from the anchor: A > 0 where the
policy is already above it, A < 0 where it is already below. A token with A = 0 is kept by all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.registry import registry


@dataclass(frozen=True, eq=False)
class TrustRegionTokens:
    """Inputs of a trust-region rule, each [T], without gradient; log-probs are <= 0."""

    log_probs: Tensor  # log pi(a)
    anchor_log_probs: Tensor  # of the policy that the mask compares with: mu, or pi' where recomputed
    rollout_log_probs: Tensor  # log mu(a)
    advantages: Tensor
    divergence: Tensor


@dataclass(frozen=True)
class TrustRegionRule:
    """A registered trust-region rule."""

    drops: Callable[[Objective, TrustRegionTokens], Tensor]  # [T] bool: the tokens that do not learn
    id: int  # its number in DppoRule of kernels/csrc/capi.h, or one that neither that nor another rule has


def trust_region_mask(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Return the mask M, [T] bool: True where the token learns."""
    return ~RULES[objective.rule].drops(objective, tokens)


def drops_none(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop nothing: PG-IS, PG-TIS and CISPO."""
    return torch.zeros_like(tokens.advantages, dtype=torch.bool)


def drops_by_ratio(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by PPO's clip (Eq. 9): pi/anchor above 1 + eps_high for A > 0, below 1 - eps_low for A < 0.

    Section 6's relaxed forms lift a side for the tokens that the rollout policy gave less than `alpha`,
    compared as log-probs: so mu = alpha stays equal in float32.
    """
    ratio = (tokens.log_probs - tokens.anchor_log_probs).exp()
    is_rare = tokens.rollout_log_probs < objective.log_alpha
    is_above = ratio > 1 + objective.eps_high
    is_below = ratio < 1 - objective.eps_low
    if objective.relax in ("high", "both"):
        is_above = is_above & ~is_rare
    if objective.relax in ("low", "both"):
        is_below = is_below & ~is_rare
    return _by_sign(tokens.advantages, is_above, is_below)


def drops_by_divergence(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by DPPO's rule (Eq. 12): moving away from the anchor, and the divergence strictly above delta.

    Direction is read off log-probs: probabilities near 1 round to the same number long before these do.
    """
    is_above = tokens.log_probs > tokens.anchor_log_probs
    is_below = tokens.log_probs < tokens.anchor_log_probs
    return _by_sign(
        tokens.advantages,
        is_above & (tokens.divergence > objective.delta_high),
        is_below & (tokens.divergence > objective.delta_low),
    )


def drops_bad_negatives(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by section 5.3's minimal mask: A < 0 and the anchor's probability at least delta above pi's."""
    is_far_below = tokens.anchor_log_probs.exp() - tokens.log_probs.exp() >= objective.delta_low
    return is_far_below & (tokens.advantages < 0)


def _by_sign(advantages: Tensor, drops_positive: Tensor, drops_negative: Tensor) -> Tensor:
    return ((advantages > 0) & drops_positive) | ((advantages < 0) & drops_negative)


RULES: Mapping[str, TrustRegionRule] = registry(
    "RULES",
    {
        "none": TrustRegionRule(drops_none, id=0),
        "ratio": TrustRegionRule(drops_by_ratio, id=1),
        "divergence": TrustRegionRule(drops_by_divergence, id=2),
        "negative": TrustRegionRule(drops_bad_negatives, id=3),
    },
)
