"""Rules of other papers and frameworks over complete responses; each names its source."""

import torch
from torch import Tensor

from megatron_dppo.algorithms.masks import drops_by_ratio
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.token_rules import trainer_log_probs
from megatron_dppo.algorithms.trust_region import TrustRegionTokens, by_sign


def log_response_ratio(tokens: TrustRegionTokens, log_probs: Tensor, others: Tensor) -> Tensor:
    """Return the mean over each token's response of log_probs - others. [T], [T] -> [T]."""
    return tokens.whole_responses.mean(log_probs - others)


def drops_by_response_ratio(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by PPO's clip of s = exp(mean log pi/anchor) of the response (GSPO, arXiv 2507.18071, Eq. 5).

    3e-4 and 4e-4 are from its experiments. TRL 1.16, slime and verl (August 2026) have the same gradients,
    except that verl has no gradient if log s is above 10.
    """
    ratio = log_response_ratio(tokens, tokens.log_probs, tokens.anchor_log_probs).exp()
    return by_sign(tokens.advantages, ratio > 1 + objective.eps_high, ratio < 1 - objective.eps_low)


def drops_mismatched_responses(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop by PPO's clip, and responses whose exp(mean log rho) is outside [rho_low, rho_high].

    NeMo-RL's "seq-mask-tis" (`loss_functions.py` of August 2026); verl's `seq_mean_k1` bounds mu/pi' instead,
    so that its sides are swapped. rho = pi'/mu; without a recomputed anchor it is pi/mu.
    """
    rho = log_response_ratio(tokens, trainer_log_probs(objective, tokens), tokens.rollout_log_probs).exp()
    return drops_by_ratio(objective, tokens) | (rho < objective.rho_low) | (rho > objective.rho_high)


def drops_divergent_responses(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Drop responses with a divergence above token_kl, or a mean above response_kl (TRM, arXiv 2512.23075).

    Section 4 and its algorithm 1; either threshold may be inf. The paper's KL is over the whole vocabulary; a
    Top-K or binary one is a lower bound of it, and drops no response that the paper keeps. verl's `seq_max_k3`
    and `seq_mean_k3` (August 2026) put k3 of the sampled token in its place, so that they drop others.
    """
    responses = tokens.whole_responses
    is_far = responses.max(tokens.divergence) > objective.token_kl
    return is_far | (responses.mean(tokens.divergence) > objective.response_kl)


def drops_by_prefix(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
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
