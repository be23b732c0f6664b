"""Trust-region rules of other papers and frameworks that read complete responses; each names its source."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms.fields import number
from megatron_dppo.algorithms.inputs import TrustRegionTokens, by_sign
from megatron_dppo.algorithms.objective import Importance, Objective, presets
from megatron_dppo.algorithms.paper_rules import HIGH_CLIP, LOW_CLIP, Clip, Deltas
from megatron_dppo.algorithms.token_rules import RatioBand
from megatron_dppo.errors import Problem


@dataclass(frozen=True, kw_only=True)
class ResponseRatio(Clip):
    """Drop by PPO's clip of s = exp(mean log pi/anchor) of the response (GSPO, arXiv 2507.18071, Eq. 5).

    3e-4 and 4e-4 are from its experiments. TRL 1.16, slime and verl (August 2026) have the same gradients,
    except that verl has no gradient if log s is above 10.
    """

    rule: ClassVar[str] = "response_ratio"
    id: ClassVar[int] = 9
    over_responses: ClassVar[bool] = True

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        log_ratio = tokens.whole_responses.mean(tokens.log_probs - tokens.anchor_log_probs)
        return self.clips(tokens, log_ratio.exp())


presets(ResponseRatio(name="gspo", importance="response", eps_low=3e-4, eps_high=4e-4))


@dataclass(frozen=True, kw_only=True)
class ResponseMismatch(RatioBand):
    """Drop by PPO's clip, and responses whose exp(mean log rho) is outside [rho_low, rho_high].

    NeMo-RL's "seq-mask-tis" (`loss_functions.py` of August 2026); verl's `seq_mean_k1` bounds mu/pi' instead,
    so that its sides are swapped. rho = pi'/mu; without a recomputed anchor it is pi/mu.
    """

    rule: ClassVar[str] = "response_mismatch"
    id: ClassVar[int] = 10
    over_responses: ClassVar[bool] = True

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        rho = tokens.whole_responses.mean(self.log_rho(tokens)).exp()
        return self.clips(tokens, tokens.anchor_ratio) | self.is_outside(rho)


presets(
    ResponseMismatch(name="mis", eps_low=0.2, eps_high=0.2, anchor="recomputed", rho_low=0.999, rho_high=1.002)
)


@dataclass(frozen=True, kw_only=True)
class ResponseDivergence(Objective):
    """Drop responses with a divergence above token_kl, or a mean above response_kl (TRM, arXiv 2512.23075).

    Section 4 and its algorithm 1; either threshold may be inf. The paper's KL is over the whole vocabulary; a
    Top-K or binary one is a lower bound of it, and drops no response that the paper keeps. verl's `seq_max_k3`
    and `seq_mean_k3` (August 2026) put k3 of the sampled token in its place, so that they drop others.
    """

    rule: ClassVar[str] = "response_divergence"
    id: ClassVar[int] = 11
    over_responses: ClassVar[bool] = True

    token_kl: float = number(
        "Largest divergence of a token. A response with a larger one is masked.",
        bounds="divergence",
        is_main=True,
    )
    response_kl: float = number(
        "Largest mean divergence of a response. A response above it is masked.",
        bounds="divergence",
        is_main=True,
    )

    def bound_of(self, field: str) -> float | None:
        bound = super().bound_of(field)
        return min(bound, self.token_kl) if field == "response_kl" and bound is not None else bound

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        responses = tokens.whole_responses
        is_far = responses.max(tokens.divergence) > self.token_kl
        return is_far | (responses.mean(tokens.divergence) > self.response_kl)


presets(ResponseDivergence(name="trm", divergence="topk_kl", token_kl=0.1, response_kl=0.002))


@dataclass(frozen=True, kw_only=True)
class Prefix(Deltas):
    """Drop tokens beyond their response's budget of divergence (CPPO, arXiv 2606.10968, Eq. 8 to 10).

    A token that moves away from the anchor is kept where w_t D_t <= min(delta, delta + b W - S), with W and S
    the sums of w and w D over the response before it, dropped tokens included; w falls linearly from 1 at the
    first token to `late_weight` at the last. b is the response's 90th percentile of D, between `prefix_delta`
    and `prefix_delta_max` (Eq. 22). Tokens that do not learn are no part of a response: the paper has none.
    Its delta is .15 for dense models, .2 for a 30B-A3B, as in UniRL's `cppo.py`, whose mask is the same
    (2026); b lies between .02 and .04 for base models, and is .015 for one that was trained before.
    """

    rule: ClassVar[str] = "prefix"
    id: ClassVar[int] = 12
    over_responses: ClassVar[bool] = True

    prefix_delta: float = number(
        "Lower bound of a response's budget, the mean divergence allowed up to any token. The budget is the "
        "90th percentile of the response's divergences, within both bounds.",
        bounds="divergence",
        may_be_0=True,
        is_main=True,
    )
    prefix_delta_max: float = number("Upper bound of a response's budget.", is_main=True)
    late_weight: float = number(
        "Weight of a response's last token in the mean divergence. The first token has weight 1.",
        1.0,
        is_finite=True,
    )

    def bounded_signs(self) -> tuple[bool, bool]:
        return self.delta_low < math.inf, self.delta_high < math.inf

    def contradictions(self) -> list[Problem]:
        return [*self.crossed("prefix_delta", "prefix_delta_max"), *super().contradictions()]

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        responses = tokens.whole_responses
        divergence = tokens.divergence
        place = responses.num_before.to(divergence.dtype) / (responses.num_tokens - 1).clamp(min=1)
        weight = 1 - (1 - self.late_weight) * place
        spent = weight * divergence
        budget = responses.quantile(divergence, 0.9).clamp(self.prefix_delta, self.prefix_delta_max)
        slack = budget * responses.before(weight) - responses.before(spent)
        slack = torch.where(budget.isinf(), 0.0, slack.clamp(max=0))
        delta = tokens.of_sign(self.delta_high, self.delta_low)
        return tokens.moves_away & (spent > delta + slack)


def _prefix(name: str, divergence: str) -> Prefix:
    budget: dict[str, Any] = {"prefix_delta": 0.02, "prefix_delta_max": 0.04, "late_weight": 0.8}
    return Prefix(name=name, divergence=divergence, delta_low=0.15, delta_high=0.15, **budget)


presets(_prefix("cppo", "binary_tv"), _prefix("cppo_topk", "topk_tv"))


@dataclass(frozen=True, kw_only=True)
class Staleness(Clip):
    """Drop by PPO's clip, tightened for the stalest tokens (SAT, arXiv 2607.18722, Eq. 13 to 19).

    q is the smallest |log pi/anchor| that at least `stale_share` of the tokens do not exceed. Above it, the
    clip's side that pi is on shrinks by 1 / (1 + (|log pi/anchor| / q)^2). The paper takes q over a
    micro-batch, so that a token's fate depends on its neighbours in the packing. Here q is the response's own,
    the same in every layout: a response that is stale throughout is not tightened more than another. The
    paper's SAT-GSPO, which scores responses by their mean ratio, is not included. Its code was not found.
    """

    rule: ClassVar[str] = "staleness"
    id: ClassVar[int] = 15
    over_responses: ClassVar[bool] = True

    stale_share: float = number(
        "Share of a response's tokens, those nearest to the anchor, whose clip is not tightened.",
        1.0,
        is_finite=True,
        at_most=1.0,
    )

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        log_ratio = tokens.log_probs - tokens.anchor_log_probs
        staleness = log_ratio.abs()
        q = tokens.whole_responses.at_rank(staleness, self.stale_share)
        is_tail = (staleness > q) & (q > 0)
        radius = torch.where(is_tail, 1 / (1 + (staleness / q).square()), 1.0)
        return self.clips(tokens, log_ratio.exp(), radius)


presets(Staleness(name="sat", eps_low=0.2, eps_high=0.2, stale_share=0.9))


@dataclass(frozen=True, kw_only=True)
class Gamma(Objective):
    """Weigh by W^k exp(l (1 - W)), W the response's product of pi/mu (VESPO, arXiv 2602.10693v3, Eq. 20).

    The weight is in place of r. k is `power_high` if A > 0, else `power_low`; l is `decay_high` or `decay_low`
    (numbers: section 4.1). W is not normalised by length. TRL 1.16 and the authors' code (February 2026) have
    the same gradients, except that they clamp log W to [-18.4, 20] and each log pi/mu to [-20, 20]. The
    authors' code takes the sign of A from the response's first token.
    """

    rule: ClassVar[str] = "gamma"
    id: ClassVar[int] = 16
    over_responses: ClassVar[bool] = True
    replaces_ratio: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False

    importance: Importance = "rule"
    power_low: float = number(
        "Exponent of the response's ratio in the weight, for negative advantages.",
        1.0,
        above_0=True,
        is_finite=True,
    )
    power_high: float = number(
        "Exponent of the response's ratio in the weight, for positive advantages.",
        1.0,
        above_0=True,
        is_finite=True,
    )
    decay_low: float = number(
        "Rate at which the weight falls with the response's ratio, for negative advantages.",
        1.0,
        above_0=True,
        is_finite=True,
        is_main=True,
    )
    decay_high: float = number(
        "Rate at which the weight falls with the response's ratio, for positive advantages.",
        1.0,
        above_0=True,
        is_finite=True,
        is_main=True,
    )

    def bounded_signs(self) -> tuple[bool, bool]:
        return True, True

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        log_w = tokens.whole_responses.sum(tokens.log_probs - tokens.rollout_log_probs)
        power = tokens.of_sign(self.power_high, self.power_low)
        decay = tokens.of_sign(self.decay_high, self.decay_low)
        return (power * log_w - decay * torch.expm1(log_w)).exp()


presets(Gamma(name="vespo", power_low=3.0, power_high=2.0, decay_low=2.0, decay_high=3.0))


@dataclass(frozen=True, kw_only=True)
class Geometric(Objective):
    """Weigh by the geometric mean of the response's clipped ratios (GMPO, arXiv 2507.20673, section 4).

    The weight is in place of r. log pi/anchor is clipped to at most `eps_high` if A > 0, and to at least
    -`eps_low` otherwise; beyond that, the update is dropped. With a recomputed anchor, log pi'/mu is added
    unclipped. TRL 1.16, verl and the authors' code have the same gradients; verl adds 1e-8 to the number of
    tokens.
    """

    rule: ClassVar[str] = "geometric"
    id: ClassVar[int] = 17
    over_responses: ClassVar[bool] = True
    replaces_ratio: ClassVar[bool] = True

    importance: Importance = "rule"
    eps_low: float = number(LOW_CLIP, bounds=math.inf, is_main=True)  # of log pi/anchor
    eps_high: float = number(HIGH_CLIP, bounds=math.inf, is_main=True)

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        log_ratio = tokens.log_probs - tokens.anchor_log_probs
        is_above, is_below = log_ratio > self.eps_high, log_ratio < -self.eps_low
        clipped = torch.where(
            tokens.advantages > 0, log_ratio.clamp(max=self.eps_high), log_ratio.clamp(min=-self.eps_low)
        )
        mean = tokens.whole_responses.mean(clipped + (tokens.anchor_log_probs - tokens.rollout_log_probs))
        return torch.where(by_sign(tokens.advantages, is_above, is_below), 0.0, mean.exp())


presets(Geometric(name="gmpo", eps_low=0.4, eps_high=0.4))


@dataclass(frozen=True, kw_only=True)
class LowestPrefix(Objective):
    """Weigh by r times the smallest r of the tokens before it, in place of r (MinPRO, arXiv 2601.22718).

    The product is clipped to [1 - `eps_low`, 1 + `eps_high`] and constant in the gradient, as in CISPO. The
    formula is known from a survey, and no public code was found. Nor were the paper's bounds: the preset
    clips as this project's `cispo` does, at 5 and not below.
    """

    rule: ClassVar[str] = "lowest_prefix"
    id: ClassVar[int] = 18
    over_responses: ClassVar[bool] = True
    replaces_ratio: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False

    importance: Importance = "rule"
    eps_low: float = number("Ratio clip below 1.", is_main=True)
    eps_high: float = number("Ratio clip above 1.", is_main=True)

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        log_ratio = tokens.log_probs - tokens.rollout_log_probs
        lowest = tokens.whole_responses.lowest_before(log_ratio)
        product = (log_ratio + torch.where(lowest == torch.inf, 0.0, lowest)).exp()
        return product.clamp(1 - self.eps_low, 1 + self.eps_high)


presets(LowestPrefix(name="minpro", eps_low=1.0, eps_high=4.0))
