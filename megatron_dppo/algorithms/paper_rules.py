"""The trust-region rules and presets of arXiv 2602.04879 (Eq. 12, sections 5 and 6, App. D and F).

They drop or keep tokens. They only drop a token if its update would push the policy further from the anchor:
A > 0 if the policy is already above it, A < 0 if it is already below. All rules keep a token with A = 0.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dppo.algorithms.fields import number
from megatron_dppo.algorithms.inputs import TrustRegionTokens, by_sign
from megatron_dppo.algorithms.objective import Objective, presets

Relax = Literal["none", "high", "low", "both"]
LOW_DELTA = "Divergence threshold for negative advantages."
HIGH_DELTA = "Divergence threshold for positive advantages."
LOW_CLIP = "Ratio clip below 1, for negative advantages."
HIGH_CLIP = "Ratio clip above 1, for positive advantages."


@dataclass(frozen=True, kw_only=True)
class Unmasked(Objective):
    """Drop nothing: PG-IS, PG-TIS and CISPO."""

    rule: ClassVar[str] = "none"
    id: ClassVar[int] = 0
    reads_anchor: ClassVar[bool] = False

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        return torch.zeros_like(tokens.advantages, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class Clip(Objective):
    """A rule with a ratio's clip."""

    eps_low: float = number(LOW_CLIP, bounds=1.0, is_main=True)  # 1 - ratio is at most 1
    eps_high: float = number(HIGH_CLIP, bounds=math.inf, is_main=True)

    def clips(
        self, tokens: TrustRegionTokens, ratio: Float[Tensor, " T"], radius: Tensor | float = 1.0
    ) -> Bool[Tensor, " T"]:
        """Return the tokens with a ratio above 1 + eps_high if A > 0, or below 1 - eps_low if A < 0."""
        is_above, is_below = ratio > 1 + self.eps_high * radius, ratio < 1 - self.eps_low * radius
        return by_sign(tokens.advantages, is_above, is_below)


@dataclass(frozen=True, kw_only=True)
class Ratio(Clip):
    """Drop by PPO's clip (Eq. 9) of pi/anchor.

    Section 6's relaxed forms lift a side for the tokens that the rollout policy gave less than `alpha`,
    compared as log-probs: so mu = alpha stays equal in float32.

    Attributes:
        relax: Side of the clip that is lifted for tokens with mu(a) < alpha.
    """

    rule: ClassVar[str] = "ratio"
    id: ClassVar[int] = 1
    choices = MappingProxyType({**Objective.choices, "relax": get_args(Relax)})

    relax: Relax = "none"
    alpha: float = number("Tokens with mu below this are not clipped on the relaxed side.", 0.0, bounds=1.0)

    @property
    def own_fields(self) -> tuple[str, ...]:
        found = super().own_fields
        return found if self.relax != "none" else tuple(each for each in found if each != "alpha")

    @property
    def log_alpha(self) -> float:
        """Log of `alpha`, -inf for none: rarity is compared as log-probs."""
        return math.log(self.alpha) if self.alpha > 0 else -math.inf

    def bounded_signs(self) -> tuple[bool, bool]:
        is_lifted = self.alpha == math.inf  # for all tokens: each has mu < inf
        low = self.eps_low < math.inf and not (is_lifted and self.relax in ("low", "both"))
        return low, self.eps_high < math.inf and not (is_lifted and self.relax in ("high", "both"))

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        is_rare = tokens.rollout_log_probs < self.log_alpha
        of_positive, of_negative = self.relax in ("high", "both"), self.relax in ("low", "both")
        is_lifted = is_rare & torch.where(tokens.advantages > 0, of_positive, of_negative)
        return self.clips(tokens, tokens.anchor_ratio) & ~is_lifted


@dataclass(frozen=True, kw_only=True)
class Deltas(Objective):
    """A rule with thresholds of the divergence."""

    delta_low: float = number(LOW_DELTA, bounds="divergence", is_main=True)
    delta_high: float = number(HIGH_DELTA, bounds="divergence", is_main=True)

    def is_far(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        """Return whether each token's divergence is above (not at) the delta for its advantage's sign."""
        is_above, is_below = tokens.divergence > self.delta_high, tokens.divergence > self.delta_low
        return by_sign(tokens.advantages, is_above, is_below)


@dataclass(frozen=True, kw_only=True)
class Divergence(Deltas):
    """Drop by DPPO's rule (Eq. 12): moving away from the anchor, and the divergence strictly above delta."""

    rule: ClassVar[str] = "divergence"
    id: ClassVar[int] = 2

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        return tokens.moves_away & self.is_far(tokens)


@dataclass(frozen=True, kw_only=True)
class Negative(Objective):
    """Drop by section 5.3's minimal mask: A < 0 and the anchor's probability at least delta above pi's."""

    rule: ClassVar[str] = "negative"
    id: ClassVar[int] = 3

    delta_low: float = number(LOW_DELTA, bounds=1.0, is_main=True)

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        is_far_below = tokens.anchor_log_probs.exp() - tokens.log_probs.exp() >= self.delta_low
        return is_far_below & (tokens.advantages < 0)


def _ratio(name: str, eps_high: float = 0.28, **others: Any) -> Ratio:
    return Ratio(name=name, eps_low=0.2, eps_high=eps_high, **others)


def _dppo(name: str, divergence: str, delta: float, **others: Any) -> Divergence:
    return Divergence(name=name, divergence=divergence, delta_low=delta, delta_high=delta, **others)


PAPER: tuple[str, ...] = tuple(
    objective.name
    for objective in presets(
        Unmasked(name="pg_is"),
        Unmasked(name="pg_tis", ratio_cap=3.0),
        Unmasked(name="cispo", ratio_cap=5.0),
        _ratio("grpo", 0.2),
        _ratio("grpo_clip_higher"),
        _ratio("minirl", anchor="recomputed"),
        _ratio("minirl_tis", anchor="recomputed", ratio_cap=3.0),
        _dppo("dppo_binary_tv", "binary_tv", 0.15),
        _dppo("dppo_binary_kl", "binary_kl", 0.05),
        _dppo("dppo_topk_tv", "topk_tv", 0.2, top_k=20),
        _dppo("dppo_topk_kl", "topk_kl", 0.05, top_k=20),
        _dppo("dppo_binary_tv_decoupled", "binary_tv", 0.15, anchor="recomputed"),
        _dppo("dppo_binary_kl_decoupled", "binary_kl", 0.05, anchor="recomputed"),
        Negative(name="negative_mask", delta_low=0.5),
        Negative(name="negative_mask_recomputed", delta_low=0.5, anchor="recomputed"),
        _ratio("relax_high", relax="high", alpha=0.1),
        _ratio("relax_low", relax="low", alpha=0.1),
        _ratio("relax_both", relax="both", alpha=0.1),
    )
)
"""Names of the presets from the paper and its authors' code.

The paper runs them all but `dppo_binary_tv_decoupled`, which only the code has.
"""
