"""Rules of other papers and frameworks that look at tokens one by one; each names its source."""

import torch
from torch import Tensor

from megatron_dppo.algorithms.masks import drops_by_ratio, is_far
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.trust_region import TrustRegionTokens


def drops_by_distance(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by the divergence, in both directions: |pi - mu| > .3 in prime-rl's IPO.

    Read in its `trainer/rl/loss.py` of August 2026; there is no paper. The default was .1 with
    1e-3 (log pi/mu)^2 added, `log_ratio_coef` here. It is .3 without that term since 2026-09-18 (#3586).
    """
    return is_far(objective, tokens)


def drops_outside_band(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by PPO's clip, and if rho is outside [rho_low, rho_high] (IcePop, of Ring-1T's arXiv 2510.18855).

    Its bounds .5 and 5 are from NeMo-RL. The losses of NeMo-RL and slime have the same gradients (August 2026).
    rho = pi'/mu is the mismatch of trainer and engine before the step; without a recomputed anchor it is pi/mu.
    PPO's ratio pi/pi' times rho is pi/mu, our importance weight, so both masks act on it.
    """
    log_rho = trainer_log_probs(objective, tokens) - tokens.rollout_log_probs
    is_outside = (log_rho.exp() < objective.rho_low) | (log_rho.exp() > objective.rho_high)
    return drops_by_ratio(objective, tokens) | is_outside


def trainer_log_probs(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Return the log-probs to compare with the engine's: pi' if recomputed, else pi. [T]."""
    return tokens.anchor_log_probs if objective.anchor == "recomputed" else tokens.log_probs


def drops_by_prediction(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop if the divergence is above delta and the step would raise KL(mu || pi) (arXiv 2607.10848).

    The logits' gradient of the KL is pi - mu, and the update moves them along A (e_a - pi): so the KL grows
    if A [(pi_a - mu_a) - sum_i pi_i (pi_i - mu_i)] is above 0. The sum runs over the outcomes of the Top-K
    partition. The mass outside it counts as one token, as in the KL that delta bounds. This is the paper's
    estimator that aggregates the tail. No public code was found.
    """
    masses = tokens.log_masses.exp()
    moved = masses - tokens.anchor_log_masses.exp()
    own = tokens.log_probs.exp() - tokens.rollout_log_probs.exp()
    grows = tokens.advantages * (own - (masses * moved).sum(1)) > 0
    return grows & is_far(objective, tokens)


def weigh_linearly(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Weigh by 1 - sign(A (r - 1)) |pi - mu| / delta (DRPO, arXiv 2606.09821, Eq. 9 and Table 1).

    Updates away from the anchor weigh less the further it is, updates back to it more. Beyond delta the weight
    is negative, a correction, as in the paper; at its delta of 12.5 that cannot happen. UniRL's `drpo.py`
    has the same gradients (June 2026), except that it has none if |log r| is above 20.
    """
    delta = tokens.of_sign(objective.delta_high, objective.delta_low)
    direction = tokens.moves_away.to(delta.dtype) - tokens.moves_back.to(delta.dtype)
    return 1 - direction * tokens.divergence / delta


def weigh_by_sigmoid(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Weigh by 4 s (1 - s), s = sigmoid(tau (r - 1)) (SAPO, arXiv 2511.20347, Eq. 6 to 8).

    tau is `tau_high` if A > 0, else `tau_low`. The weight is 1 at r = 1 and falls on both sides. TRL 1.16 and
    verl (August 2026) have the same gradients, except that verl has no gradient if |log r| is above 20.
    """
    ratio = (tokens.log_probs - tokens.anchor_log_probs).exp()
    half = tokens.of_sign(objective.tau_high, objective.tau_low) * (ratio - 1) / 2
    return 1 / torch.cosh(half).square()  # 4 sigmoid(x) (1 - sigmoid(x)) = sech(x/2)^2
