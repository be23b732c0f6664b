"""The paper's rules (arXiv 2602.04879, Eq. 12 and its competitors): each drops or keeps tokens.

They only drop a token if its update would push the policy further from the anchor: A > 0 if the policy
is already above the anchor, A < 0 if it is already below. All rules keep a token with A = 0.
"""

import torch
from torch import Tensor

from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.trust_region import TrustRegionTokens, by_sign


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
    return by_sign(tokens.advantages, is_above, is_below)


def drops_by_divergence(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by DPPO's rule (Eq. 12): moving away from the anchor, and the divergence strictly above delta."""
    return tokens.moves_away & is_far(objective, tokens)


def is_far(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Return whether each token's divergence is above (not at) the delta of its advantage's sign, [T] bool."""
    return by_sign(
        tokens.advantages,
        tokens.divergence > objective.delta_high,
        tokens.divergence > objective.delta_low,
    )


def drops_bad_negatives(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by section 5.3's minimal mask: A < 0 and the anchor's probability at least delta above pi's."""
    is_far_below = tokens.anchor_log_probs.exp() - tokens.log_probs.exp() >= objective.delta_low
    return is_far_below & (tokens.advantages < 0)
