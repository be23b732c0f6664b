"""KL of the policy from a frozen reference policy: a term of the loss, as GRPO was published with.

Estimators of http://joschu.net/blog/kl-approx.html; k3 in the loss is Eq. 4 of arXiv 2402.03300.
"""

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import LearningTokens
from megatron_dppo.algorithms.objective import Objective

MAX_LOG_RATIO = 20.0
"""log(ref / pi) of a token above this counts as this: exp of it is 5e8, and squares of that stay finite."""


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return exp(d) - d - 1, d = log ref - log pi, [T] nats: estimates KL(pi || ref), and is never negative."""
    d = _log_ratio(log_probs, ref_log_probs)
    return d.expm1() - d


@torch.no_grad()
def ref_kl_term(objective: Objective, tokens: LearningTokens, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the term of each token and its gradient by log pi, [T] each, without `token_weights`.

    Every learning token has one, masked or not. With d = log ref - log pi:

    - "k3": coef (exp(d) - d - 1), and the gradient of just that, coef (1 - exp(d)). As published it is not
      weighed by pi/mu. The value estimates KL(pi || ref), the gradient does not descend it: at pi = mu its mean
      is the gradient of KL(ref || pi), which is the same to first order around pi = ref.
    - "k1": coef min(pi/mu, C) (-d), as value and as gradient: a penalty of the token's own advantage, which no
      trust region masks. At C = inf its mean over mu is the gradient of KL(pi || ref) at each position.
      Differentiating -d itself would give only the score, and the mean of the score is 0.

    Args:
        objective: Objective with `ref_kl_coef` above 0.
        tokens: T of them, with log-probs of the reference.
        ratio: [T] pi/mu of the token.
    """
    assert tokens.ref_log_probs is not None, "required inputs are checked first"
    log_probs = tokens.trained_log_probs.detach()
    d = _log_ratio(log_probs, tokens.ref_log_probs)
    if objective.ref_kl == "k3":
        value, by_log_prob = d.expm1() - d, -d.expm1()
    else:
        value = by_log_prob = -d * ratio.clamp(max=objective.ratio_cap)
    coef = objective.ref_kl_coef  # of rows that do not learn d is 0
    return coef * value, torch.where(log_probs == -torch.inf, 0.0, coef * by_log_prob)


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
