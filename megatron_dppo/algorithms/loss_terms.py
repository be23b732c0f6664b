"""Terms of the loss in addition to the policy gradient: elementwise over learning tokens, masked ones included.

`LOSS_TERMS` lists them. The losses, their kernels, the checks of inputs and the metrics read this table, and
every objective has the coefficients, so that a term is a coefficient, a function and an entry here.

Estimators of the KL are of http://joschu.net/blog/kl-approx.html; k3 in the loss is Eq. 4 of arXiv 2402.03300.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dppo.algorithms.fields import choice, number
from megatron_dppo.algorithms.inputs import TrustRegionTokens
from megatron_dppo.types import RolloutTokens

TermOfTokens: TypeAlias = tuple[Float[Tensor, " T"], Float[Tensor, " T"]]
"""Each token's loss, and its gradient by log pi."""
RefKl = Literal["k3", "k1"]
MAX_LOG_RATIO = 20.0
"""log(ref / pi) of a token above this counts as this: exp of it is 5e8, and squares of that stay finite."""


@dataclass(frozen=True, kw_only=True)
class TermCoefficients:
    """Weights of the terms; with a weight of 0 a term is neither computed nor measured.

    Attributes:
        ratio_cap: C, the cap on the importance weight pi/mu.
        log_ratio_coef: Weight of (log pi/mu)^2.
        ref_kl_coef: Weight of the KL from the reference policy.
        ref_kl: Estimator of that KL, and with it its gradient; see `ref_kl_term`.
    """

    ratio_cap: float = number("Cap C on the importance weight pi/mu.", above_0=True)
    log_ratio_coef: float = number(
        "Weight of (log pi/mu)^2 in the loss of every trained token.", 0.0, is_finite=True
    )
    ref_kl_coef: float = number(
        "Weight of the KL to the reference policy `model.reference`, over all trained tokens; 0 is off.",
        0.0,
        is_finite=True,
    )
    ref_kl: RefKl = choice(
        "k3: GRPO's estimator, in the loss. k1: log pi/ref, weighted by pi/mu, as a penalty on the advantage.",
        "k3",
    )

    @property
    def inputs_of_terms(self) -> dict[str, str]:
        """Names of the optional inputs that the terms in use read, each with the coefficient that needs it."""
        return {term.reads: name for name, term in terms_in_use(self).items() if term.reads is not None}


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss. Its functions take and return tensors with T rows."""

    function: Callable[["TermCoefficients", TrustRegionTokens, Float[Tensor, " T"]], TermOfTokens]
    """Returns each token's loss and its gradient by log pi, times coefficient and `token_weights`, given pi/mu.

    Rows that do not learn have log-probs and weight 0, and must get 0.
    """
    reads: str | None = None  # the one of OPTIONAL_INPUTS that it needs
    metric: str | None = None  # name of the mean of `value` over learning tokens, which each step reports
    value: Callable[[Float[Tensor, " T"], RolloutTokens], Float[Tensor, " T"]] | None = (
        None  # of log pi and the tokens
    )


def log_ratio_term(
    weights: TermCoefficients, tokens: TrustRegionTokens, ratio: Float[Tensor, " T"]
) -> TermOfTokens:
    """Return the term coef (log pi/mu)^2, and its gradient."""
    scale = weights.log_ratio_coef * tokens.token_weights
    log_ratio = torch.where(scale != 0, tokens.trained_log_probs.detach() - tokens.rollout_log_probs, 0.0)
    return scale * log_ratio.square(), 2 * scale * log_ratio


def ref_kl_term(
    weights: TermCoefficients, tokens: TrustRegionTokens, ratio: Float[Tensor, " T"]
) -> TermOfTokens:
    """Return the KL from the reference policy, and its gradient.

    `ref_kl` chooses the estimator, with d = log ref - log pi:

    - "k3": coef (exp(d) - d - 1), and the gradient of just that, coef (1 - exp(d)). As published it is not
      weighed by pi/mu. The value estimates KL(pi || ref), the gradient does not descend it: at pi = mu its mean
      is the gradient of KL(ref || pi), which is the same to first order around pi = ref.
    - "k1": coef min(pi/mu, C) (-d), as value and as gradient: a penalty of the token's own advantage, which no
      trust region masks. At C = inf its mean over mu is the gradient of KL(pi || ref) at each position.
      Differentiating -d itself would give only the score, and the mean of the score is 0.
    """
    assert tokens.ref_log_probs is not None, "required inputs are checked first"
    log_probs, of_tokens = tokens.trained_log_probs.detach(), tokens.token_weights
    d = _log_ratio(log_probs, tokens.ref_log_probs)  # 0 of rows that do not learn
    if weights.ref_kl == "k3":
        value, by_log_prob = d.expm1() - d, -d.expm1()
    else:
        value = by_log_prob = -d * ratio.clamp(max=weights.ratio_cap)
    coef = weights.ref_kl_coef
    by_log_prob = torch.where(log_probs == -torch.inf, 0.0, coef * by_log_prob)
    return of_tokens * (coef * value), of_tokens * by_log_prob


def ref_kl_k3(log_probs: Float[Tensor, " T"], tokens: RolloutTokens) -> Float[Tensor, " T"]:
    """Return exp(d) - d - 1, d = log ref - log pi, nats: estimates KL(pi || ref), and is never negative."""
    assert tokens.ref_log_probs is not None, "required inputs are checked first"
    d = _log_ratio(log_probs, tokens.ref_log_probs.to(log_probs.dtype))
    return d.expm1() - d


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)


LOSS_TERMS: Mapping[str, LossTerm] = MappingProxyType(
    {
        "log_ratio_coef": LossTerm(log_ratio_term),
        "ref_kl_coef": LossTerm(ref_kl_term, reads="ref_log_probs", metric="policy/ref_kl", value=ref_kl_k3),
    }
)
"""The terms by coefficient name, in the order in which they are added."""

OPTIONAL_INPUTS: tuple[str, ...] = tuple(term.reads for term in LOSS_TERMS.values() if term.reads is not None)
"""Fields of `RolloutTokens` that only terms read."""


def terms_in_use(coefficients: TermCoefficients) -> dict[str, LossTerm]:
    """Return the terms whose coefficient is not 0."""
    return {name: term for name, term in LOSS_TERMS.items() if getattr(coefficients, name) != 0}


@torch.no_grad()
def added_terms(
    weights: TermCoefficients, tokens: TrustRegionTokens, ratio: Float[Tensor, " T"]
) -> list[TermOfTokens]:
    """Return loss and gradient of each term in use; 0 for a token of weight 0.

    Args:
        weights: Coefficients of the terms.
        tokens: T tokens.
        ratio: pi/mu of the token.
    """
    has_weight = tokens.token_weights != 0
    added: list[TermOfTokens] = []
    for term in terms_in_use(weights).values():
        loss, by_log_prob = term.function(weights, tokens, ratio)
        added.append((torch.where(has_weight, loss, 0.0), torch.where(has_weight, by_log_prob, 0.0)))
    return added
