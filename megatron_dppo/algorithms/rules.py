"""The trust-region rules: the weight that each gives to the update of a token.

The paper's rules (arXiv 2602.04879, Eq. 12 and its competitors) drop or keep tokens. They only drop a token if
its update would push the policy further from the anchor: A > 0 if the policy is already above the anchor, A < 0
if it is already below. All rules keep a token with A = 0.

Rules of other papers and frameworks follow, of single tokens and then of complete responses. Each names its
source.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms.divergence import registry
from megatron_dppo.algorithms.inputs import TrustRegionTokens, by_sign
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.trust_region import TrustRegionRule, masking

ENTROPY_FLOOR = 0.01  # nats, of arXiv 2607.22186


def drops_none(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop nothing: PG-IS, PG-TIS and CISPO."""
    return torch.zeros_like(tokens.advantages, dtype=torch.bool)


def drops_by_ratio(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
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


def drops_by_divergence(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by DPPO's rule (Eq. 12): moving away from the anchor, and the divergence strictly above delta."""
    return tokens.moves_away & is_far(objective, tokens)


def is_far(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Return whether each token's divergence is above (not at) the delta for its advantage's sign."""
    return by_sign(
        tokens.advantages,
        tokens.divergence > objective.delta_high,
        tokens.divergence > objective.delta_low,
    )


def drops_bad_negatives(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by section 5.3's minimal mask: A < 0 and the anchor's probability at least delta above pi's."""
    is_far_below = tokens.anchor_log_probs.exp() - tokens.log_probs.exp() >= objective.delta_low
    return is_far_below & (tokens.advantages < 0)


def drops_by_distance(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by the divergence, in both directions: |pi - mu| > .3 in prime-rl's IPO.

    Source: its `trainer/rl/loss.py`, August 2026; there is no paper. The default was .1 with
    1e-3 (log pi/mu)^2 added, `log_ratio_coef` here. It is .3 without that term since 2026-09-18 (#3586).
    """
    return is_far(objective, tokens)


def drops_outside_band(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by PPO's clip, and if rho is outside [rho_low, rho_high] (IcePop, of Ring-1T's arXiv 2510.18855).

    Its bounds .5 and 5 are from NeMo-RL. The losses of NeMo-RL and slime have the same gradients (August 2026).
    rho = pi'/mu is the mismatch of trainer and engine before the step; without a recomputed anchor it is pi/mu.
    PPO's ratio pi/pi' times rho is pi/mu, our importance weight, so both masks act on it.
    """
    log_rho = trainer_log_probs(objective, tokens) - tokens.rollout_log_probs
    is_outside = (log_rho.exp() < objective.rho_low) | (log_rho.exp() > objective.rho_high)
    return drops_by_ratio(objective, tokens) | is_outside


def trainer_log_probs(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Return the log-probs to compare with the engine's: pi' if recomputed, else pi."""
    return tokens.anchor_log_probs if objective.anchor == "recomputed" else tokens.log_probs


def drops_by_prediction(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
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


def drops_by_entropy(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by PPO's clip, and if (log pi/mu)^2 / (H + .01) is above delta (ESTR, arXiv 2607.22186, section 4).

    H is the rollout policy's entropy, in nats. Here it is the entropy of the Top-K partition, with the mass
    outside it as one outcome: a lower bound, so that no token is kept that the paper drops. The formulas and
    the .01 are known from summaries of the paper, which do not quote its delta or its clip: delta 1 is this
    project's choice, |log pi/mu| at most the root of H. No public code was found.
    """
    log_ratio = tokens.log_probs - tokens.rollout_log_probs
    masses = tokens.anchor_log_masses.exp()
    entropy = -torch.xlogy(masses, masses).sum(1)
    score = log_ratio.square() / (entropy + ENTROPY_FLOOR)
    return drops_by_ratio(objective, tokens) | (
        score > tokens.of_sign(objective.delta_high, objective.delta_low)
    )


def weigh_linearly(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by 1 - sign(A (r - 1)) |pi - mu| / delta (DRPO, arXiv 2606.09821, Eq. 9 and Table 1).

    Updates away from the anchor weigh less the further it is, updates back to it more. Beyond delta the weight
    is negative, a correction, as in the paper; at its delta of 12.5 that cannot happen. UniRL's `drpo.py`
    has the same gradients (June 2026), except that it has none if |log r| is above 20.
    """
    delta = tokens.of_sign(objective.delta_high, objective.delta_low)
    direction = tokens.moves_away.to(delta.dtype) - tokens.moves_back.to(delta.dtype)
    return 1 - direction * tokens.divergence / delta


def weigh_by_sigmoid(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by 4 s (1 - s), s = sigmoid(tau (r - 1)) (SAPO, arXiv 2511.20347, Eq. 6 to 8).

    tau is `tau_high` if A > 0, else `tau_low`. The weight is 1 at r = 1 and falls on both sides. TRL 1.16 and
    verl (August 2026) have the same gradients, except that verl has no gradient if |log r| is above 20.
    """
    ratio = (tokens.log_probs - tokens.anchor_log_probs).exp()
    half = tokens.of_sign(objective.tau_high, objective.tau_low) * (ratio - 1) / 2
    return 1 / torch.cosh(half).square()  # 4 sigmoid(x) (1 - sigmoid(x)) = sech(x/2)^2


def log_response_ratio(
    tokens: TrustRegionTokens, log_probs: Float[Tensor, " T"], others: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """Return the mean over each token's response of log_probs - others."""
    return tokens.whole_responses.mean(log_probs - others)


def drops_by_response_ratio(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by PPO's clip of s = exp(mean log pi/anchor) of the response (GSPO, arXiv 2507.18071, Eq. 5).

    3e-4 and 4e-4 are from its experiments. TRL 1.16, slime and verl (August 2026) have the same gradients,
    except that verl has no gradient if log s is above 10.
    """
    ratio = log_response_ratio(tokens, tokens.log_probs, tokens.anchor_log_probs).exp()
    return by_sign(tokens.advantages, ratio > 1 + objective.eps_high, ratio < 1 - objective.eps_low)


def drops_mismatched_responses(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by PPO's clip, and responses whose exp(mean log rho) is outside [rho_low, rho_high].

    NeMo-RL's "seq-mask-tis" (`loss_functions.py` of August 2026); verl's `seq_mean_k1` bounds mu/pi' instead,
    so that its sides are swapped. rho = pi'/mu; without a recomputed anchor it is pi/mu.
    """
    rho = log_response_ratio(tokens, trainer_log_probs(objective, tokens), tokens.rollout_log_probs).exp()
    return drops_by_ratio(objective, tokens) | (rho < objective.rho_low) | (rho > objective.rho_high)


def drops_divergent_responses(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop responses with a divergence above token_kl, or a mean above response_kl (TRM, arXiv 2512.23075).

    Section 4 and its algorithm 1; either threshold may be inf. The paper's KL is over the whole vocabulary; a
    Top-K or binary one is a lower bound of it, and drops no response that the paper keeps. verl's `seq_max_k3`
    and `seq_mean_k3` (August 2026) put k3 of the sampled token in its place, so that they drop others.
    """
    responses = tokens.whole_responses
    is_far = responses.max(tokens.divergence) > objective.token_kl
    return is_far | (responses.mean(tokens.divergence) > objective.response_kl)


def drops_by_prefix(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop tokens beyond their response's budget of divergence (CPPO, arXiv 2606.10968, Eq. 8 to 10).

    A token that moves away from the anchor is kept where w_t D_t <= min(delta, delta + b W - S), with W and S
    the sums of w and w D over the response before it, dropped tokens included; w falls linearly from 1 at the
    first token to `late_weight` at the last. b is the response's 90th percentile of D, between `prefix_delta`
    and `prefix_delta_max` (Eq. 22). Tokens that do not learn are no part of a response: the paper has none.
    Its delta is .15 for dense models, .2 for a 30B-A3B, as in UniRL's `cppo.py`, whose mask is the same
    (2026); b lies between .02 and .04 for base models, and is .015 for one that was trained before.
    """
    responses = tokens.whole_responses
    divergence = tokens.divergence
    place = responses.num_before.to(divergence.dtype) / (responses.num_tokens - 1).clamp(min=1)
    weight = 1 - (1 - objective.late_weight) * place
    spent = weight * divergence
    budget = responses.quantile(divergence, 0.9).clamp(objective.prefix_delta, objective.prefix_delta_max)
    slack = budget * responses.before(weight) - responses.before(spent)
    slack = torch.where(budget.isinf(), 0.0, slack.clamp(max=0))
    delta = tokens.of_sign(objective.delta_high, objective.delta_low)
    return tokens.moves_away & (spent > delta + slack)


def drops_by_staleness(objective: Objective, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
    """Drop by PPO's clip, tightened for the stalest tokens (SAT, arXiv 2607.18722, Eq. 13 to 19).

    q is the smallest |log pi/anchor| that at least `stale_share` of the tokens do not exceed. Above it, the
    clip's side that pi is on shrinks by 1 / (1 + (|log pi/anchor| / q)^2). The paper takes q over a
    micro-batch, so that a token's fate depends on its neighbours in the packing. Here q is the response's own,
    the same in every layout: a response that is stale throughout is not tightened more than another. The
    paper's SAT-GSPO, which scores responses by their mean ratio, is not included. Its code was not found.
    """
    log_ratio = tokens.log_probs - tokens.anchor_log_probs
    staleness = log_ratio.abs()
    q = tokens.whole_responses.at_rank(staleness, objective.stale_share)
    is_tail = (staleness > q) & (q > 0)
    radius = torch.where(is_tail, 1 / (1 + (staleness / q).square()), 1.0)
    ratio = log_ratio.exp()
    is_above, is_below = ratio > 1 + objective.eps_high * radius, ratio < 1 - objective.eps_low * radius
    return by_sign(tokens.advantages, is_above, is_below)


def weigh_by_gamma(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by W^k exp(l (1 - W)), W the response's product of pi/mu (VESPO, arXiv 2602.10693v3, Eq. 20).

    The weight is in place of r. k is `power_high` if A > 0, else `power_low`; l is `decay_high` or `decay_low`
    (numbers: section 4.1). W is not normalised by length. TRL 1.16 and the authors' code (February 2026) have
    the same gradients, except that they clamp log W to [-18.4, 20] and each log pi/mu to [-20, 20]. The
    authors' code takes the sign of A from the response's first token.
    """
    log_w = tokens.whole_responses.sum(tokens.log_probs - tokens.rollout_log_probs)
    power = tokens.of_sign(objective.power_high, objective.power_low)
    decay = tokens.of_sign(objective.decay_high, objective.decay_low)
    return (power * log_w - decay * torch.expm1(log_w)).exp()


def weigh_by_geometric_mean(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by the geometric mean of the response's clipped ratios (GMPO, arXiv 2507.20673, section 4).

    The weight is in place of r. log pi/anchor is clipped to at most `eps_high` if A > 0, and to at least
    -`eps_low` otherwise; beyond that, the update is dropped. With a recomputed anchor, log pi'/mu is added
    unclipped. TRL 1.16, verl and the authors' code have the same gradients; verl adds 1e-8 to the number of
    tokens.
    """
    log_ratio = tokens.log_probs - tokens.anchor_log_probs
    is_above, is_below = log_ratio > objective.eps_high, log_ratio < -objective.eps_low
    clipped = torch.where(
        tokens.advantages > 0, log_ratio.clamp(max=objective.eps_high), log_ratio.clamp(min=-objective.eps_low)
    )
    mean = tokens.whole_responses.mean(clipped + (tokens.anchor_log_probs - tokens.rollout_log_probs))
    return torch.where(by_sign(tokens.advantages, is_above, is_below), 0.0, mean.exp())


def weigh_by_lowest_prefix(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by r times the smallest r of the tokens before it, in place of r (MinPRO, arXiv 2601.22718).

    The product is clipped to [1 - `eps_low`, 1 + `eps_high`] and constant in the gradient, as in CISPO. The
    formula is known from a survey, and no public code was found. Nor were the paper's bounds: the preset
    clips as this project's `cispo` does, at 5 and not below.
    """
    log_ratio = tokens.log_probs - tokens.rollout_log_probs
    lowest = tokens.whole_responses.lowest_before(log_ratio)
    product = (log_ratio + torch.where(lowest == torch.inf, 0.0, lowest)).exp()
    return product.clamp(1 - objective.eps_low, 1 + objective.eps_high)


def weigh_by_own(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Weigh by the user's function; see `OwnRule`."""
    assert objective.own is not None, "an objective with rule = 'own' has one"
    return objective.own.weigh(tokens)


RULES: Mapping[str, TrustRegionRule] = registry(
    "RULES",
    {
        "none": TrustRegionRule(masking(drops_none), id=0),
        "ratio": TrustRegionRule(masking(drops_by_ratio), id=1),
        "divergence": TrustRegionRule(masking(drops_by_divergence), id=2),
        "negative": TrustRegionRule(masking(drops_bad_negatives), id=3),
        "distance": TrustRegionRule(masking(drops_by_distance), id=4),
        "linear": TrustRegionRule(weigh_linearly, id=5),
        "prediction": TrustRegionRule(masking(drops_by_prediction), id=6),
        "band": TrustRegionRule(masking(drops_outside_band), id=7),
        "sigmoid": TrustRegionRule(weigh_by_sigmoid, id=8),
        "response_ratio": TrustRegionRule(masking(drops_by_response_ratio), id=9),
        "response_mismatch": TrustRegionRule(masking(drops_mismatched_responses), id=10),
        "response_divergence": TrustRegionRule(masking(drops_divergent_responses), id=11),
        "prefix": TrustRegionRule(masking(drops_by_prefix), id=12),
        "own": TrustRegionRule(weigh_by_own, id=13),
        "entropy": TrustRegionRule(masking(drops_by_entropy), id=14),
        "staleness": TrustRegionRule(masking(drops_by_staleness), id=15),
        "gamma": TrustRegionRule(weigh_by_gamma, id=16),
        "geometric": TrustRegionRule(weigh_by_geometric_mean, id=17),
        "lowest_prefix": TrustRegionRule(weigh_by_lowest_prefix, id=18),
    },
)


def trust_region_weight(objective: Objective, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
    """Return the factor of each token's update: 0 drops it, 1 keeps it, below 0 reverses it."""
    return RULES[objective.rule].weigh(objective, tokens)
