"""Trust-region rules of other papers and frameworks that read one token at a time; each names its source."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms.fields import number
from megatron_dppo.algorithms.inputs import TrustRegionTokens
from megatron_dppo.algorithms.objective import Objective, presets
from megatron_dppo.algorithms.paper_rules import HIGH_CLIP, HIGH_DELTA, LOW_CLIP, LOW_DELTA, Clip, Deltas
from megatron_dppo.errors import Problem

ENTROPY_FLOOR = 0.01  # nats, of arXiv 2607.22186


@dataclass(frozen=True, kw_only=True)
class Distance(Deltas):
    """Drop by the divergence, in both directions: |pi - mu| > .3 in prime-rl's IPO.

    Source: its `trainer/rl/loss.py`, August 2026; there is no paper. The default was .1 with
    1e-3 (log pi/mu)^2 added, `log_ratio_coef` here. It is .3 without that term since 2026-09-18 (#3586).
    """

    rule: ClassVar[str] = "distance"
    id: ClassVar[int] = 4

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        return self.is_far(tokens)


presets(
    Distance(name="ipo", delta_low=0.3, delta_high=0.3),
    Distance(name="ipo_2026_08", delta_low=0.1, delta_high=0.1, log_ratio_coef=1e-3),
)


@dataclass(frozen=True, kw_only=True)
class Linear(Objective):
    """Weigh by 1 - sign(A (r - 1)) |pi - mu| / delta (DRPO, arXiv 2606.09821, Eq. 9 and Table 1).

    Updates away from the anchor weigh less the further it is, updates back to it more. Beyond delta the weight
    is negative, a correction, as in the paper; at its delta of 12.5 that cannot happen. UniRL's `drpo.py`
    has the same gradients (June 2026), except that it has none if |log r| is above 20.
    """

    rule: ClassVar[str] = "linear"
    id: ClassVar[int] = 5

    delta_low: float = number(LOW_DELTA, bounds=math.inf, above_0=True, is_main=True)  # which divides
    delta_high: float = number(HIGH_DELTA, bounds=math.inf, above_0=True, is_main=True)

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        delta = tokens.of_sign(self.delta_high, self.delta_low)
        direction = tokens.moves_away.to(delta.dtype) - tokens.moves_back.to(delta.dtype)
        return 1 - direction * tokens.divergence / delta


presets(Linear(name="drpo", delta_low=12.5, delta_high=12.5))


@dataclass(frozen=True, kw_only=True)
class Prediction(Deltas):
    """Drop if the divergence is above delta and the step would raise KL(mu || pi) (arXiv 2607.10848).

    The logits' gradient of the KL is pi - mu, and the update moves them along A (e_a - pi): so the KL grows
    if A [(pi_a - mu_a) - sum_i pi_i (pi_i - mu_i)] is above 0. The sum runs over the outcomes of the Top-K
    partition. The mass outside it counts as one token, as in the KL that delta bounds. This is the paper's
    estimator that aggregates the tail. No public code was found.
    """

    rule: ClassVar[str] = "prediction"
    id: ClassVar[int] = 6
    of_topk: ClassVar[bool] = True

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        masses = tokens.log_masses.exp()
        moved = masses - tokens.anchor_log_masses.exp()
        own = tokens.log_probs.exp() - tokens.rollout_log_probs.exp()
        grows = tokens.advantages * (own - (masses * moved).sum(1)) > 0
        return grows & self.is_far(tokens)


presets(Prediction(name="dppo_topk_kl_predictive", divergence="topk_kl", delta_low=0.15, delta_high=0.15))


@dataclass(frozen=True, kw_only=True)
class RatioBand(Clip):
    """A rule with a clip, and with bounds of rho, the ratio of trainer to engine."""

    reads_mu: ClassVar[bool] = True

    eps_low: float = number(LOW_CLIP, bounds=1.0)
    eps_high: float = number(HIGH_CLIP, bounds=math.inf)
    rho_low: float = number(
        "Smallest ratio of trainer to engine, per token or per response.", 0.0, is_main=True, around_1=True
    )
    rho_high: float = number(
        "Largest ratio of trainer to engine, per token or per response.",
        bounds=math.inf,
        is_main=True,
        around_1=True,
    )

    def bounded_signs(self) -> tuple[bool, bool]:
        is_band = self.rho_low > 0 or self.rho_high < math.inf
        return is_band or self.eps_low < math.inf, is_band or self.eps_high < math.inf

    def contradictions(self) -> list[Problem]:
        return [*self.crossed("rho_low", "rho_high"), *super().contradictions()]

    def log_rho(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        """Return log pi'/mu if the anchor is recomputed, else log pi/mu."""
        trainer = tokens.anchor_log_probs if self.anchor == "recomputed" else tokens.log_probs
        return trainer - tokens.rollout_log_probs

    def is_outside(self, rho: Float[Tensor, " T"]) -> Bool[Tensor, " T"]:
        """Return whether rho is outside its bounds."""
        return (rho < self.rho_low) | (rho > self.rho_high)


@dataclass(frozen=True, kw_only=True)
class Band(RatioBand):
    """Drop by PPO's clip, and if rho is outside [rho_low, rho_high] (IcePop, of Ring-1T's arXiv 2510.18855).

    Its bounds .5 and 5 are from NeMo-RL. The losses of NeMo-RL and slime have the same gradients (August 2026).
    rho = pi'/mu is the mismatch of trainer and engine before the step; without a recomputed anchor it is pi/mu.
    PPO's ratio pi/pi' times rho is pi/mu, our importance weight, so both masks act on it.
    """

    rule: ClassVar[str] = "band"
    id: ClassVar[int] = 7

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        return self.clips(tokens, tokens.anchor_ratio) | self.is_outside(self.log_rho(tokens).exp())


presets(Band(name="icepop", eps_low=0.2, eps_high=0.2, anchor="recomputed", rho_low=0.5, rho_high=5.0))


@dataclass(frozen=True, kw_only=True)
class Sigmoid(Objective):
    """Weigh by 4 s (1 - s), s = sigmoid(tau (r - 1)) (SAPO, arXiv 2511.20347, Eq. 6 to 8).

    tau is `tau_high` if A > 0, else `tau_low`. The weight is 1 at r = 1 and falls on both sides. TRL 1.16 and
    verl (August 2026) have the same gradients, except that verl has no gradient if |log r| is above 20.
    """

    rule: ClassVar[str] = "sigmoid"
    id: ClassVar[int] = 8

    tau_low: float = number(
        "Steepness of the weight for negative advantages.", 1.0, is_finite=True, is_main=True
    )
    tau_high: float = number(
        "Steepness of the weight for positive advantages.", 1.0, is_finite=True, is_main=True
    )

    def bounded_signs(self) -> tuple[bool, bool]:
        return self.tau_low > 0, self.tau_high > 0

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        half = tokens.of_sign(self.tau_high, self.tau_low) * (tokens.anchor_ratio - 1) / 2
        return 1 / torch.cosh(half).square()  # 4 sigmoid(x) (1 - sigmoid(x)) = sech(x/2)^2


presets(Sigmoid(name="sapo", tau_low=1.05, tau_high=1.0))


@dataclass(frozen=True, kw_only=True)
class Entropy(Clip):
    """Drop by PPO's clip, and if (log pi/mu)^2 / (H + .01) is above delta (ESTR, arXiv 2607.22186, section 4).

    H is the rollout policy's entropy, in nats. Here it is the entropy of the Top-K partition, with the mass
    outside it as one outcome: a lower bound, so that no token is kept that the paper drops. The formulas and
    the .01 are known from summaries of the paper, which do not quote its delta or its clip: delta 1 is this
    project's choice, |log pi/mu| at most the root of H. No public code was found.
    """

    rule: ClassVar[str] = "entropy"
    id: ClassVar[int] = 14
    of_topk: ClassVar[bool] = True

    delta_low: float = number(LOW_DELTA, bounds=math.inf, is_main=True)
    delta_high: float = number(HIGH_DELTA, bounds=math.inf, is_main=True)
    eps_low: float = number(LOW_CLIP, bounds=1.0)
    eps_high: float = number(HIGH_CLIP, bounds=math.inf)

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        log_ratio = tokens.log_probs - tokens.rollout_log_probs
        masses = tokens.anchor_log_masses.exp()
        entropy = -torch.xlogy(masses, masses).sum(1)
        score = log_ratio.square() / (entropy + ENTROPY_FLOOR)
        is_far = score > tokens.of_sign(self.delta_high, self.delta_low)
        return self.clips(tokens, tokens.anchor_ratio) | is_far


presets(Entropy(name="estr", divergence="topk_kl", delta_low=1.0, delta_high=1.0, eps_low=0.2, eps_high=0.2))
