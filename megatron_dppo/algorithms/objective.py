"""An objective: which tokens learn, and how much each one weighs. Plain numbers; the tensors are `loss.py`'s.

Every algorithm of the paper (arXiv 2602.04879) is one of these, for they share the gradient of Eq. 23,
sum_t M_t min(r_t, C) A_t grad log pi(y_t), and differ only in the mask M and the cap C. Others weigh tokens
(M is a number), replace r by the ratio of complete responses, or add the terms of `loss_terms.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from megatron_dppo.algorithms.divergence import DIVERGENCES, SampledToken
from megatron_dppo.algorithms.loss_terms import LOSS_TERMS, RefKl, TermCoefficients
from megatron_dppo.algorithms.trust_region import Option, OwnRule
from megatron_dppo.errors import ConfigError, Problem

Rule = Literal[
    "none",
    "ratio",
    "divergence",
    "negative",
    "distance",
    "linear",
    "prediction",
    "band",
    "sigmoid",
    "response_ratio",
    "response_mismatch",
    "response_divergence",
    "prefix",
    "entropy",
    "staleness",
    "gamma",
    "geometric",
    "lowest_prefix",
    "own",
]
Importance = Literal["token", "response", "rule"]
Relax = Literal["none", "high", "low", "both"]
Anchor = Literal["rollout", "recomputed"]

DELTAS = ("delta", "delta_low", "delta_high")
_AT_LEAST_0 = (
    *("delta_low", "delta_high", "eps_low", "eps_high", "alpha", "rho_low", "rho_high"),
    *("token_kl", "response_kl", "prefix_delta", "prefix_delta_max"),
)
_GAMMA = ("power_low", "power_high", "decay_low", "decay_high")
_FINITE = ("entropy_coef", *LOSS_TERMS, "tau_low", "tau_high", "late_weight", "stale_share", *_GAMMA)
UNIVERSAL_FIELDS = ("anchor", "entropy_coef", *LOSS_TERMS, "ref_kl")
OWN_FIELDS = ("rule_divergence", "rule_over", "rule_options")
_CLIP = ("eps_low", "eps_high")
_OVER_RESPONSES: tuple[Rule, ...] = (
    *("response_ratio", "response_mismatch", "response_divergence", "prefix"),
    *("staleness", "gamma", "geometric", "lowest_prefix"),
)
WITH_RATIO: tuple[Rule, ...] = ("gamma", "geometric", "lowest_prefix")
"""Rules whose weight is in place of pi/mu, and goes with importance = "rule"."""
_SOFT: tuple[Rule, ...] = ("linear", "sigmoid", *WITH_RATIO, "own")
_OF_TOPK: tuple[Rule, ...] = ("prediction", "entropy")
_BY_RULE: Mapping[Rule, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "ratio": _CLIP,
        "divergence": DELTAS,
        "negative": ("delta", "delta_low"),
        "distance": DELTAS,
        "linear": DELTAS,
        "prediction": DELTAS,
        "band": (*_CLIP, "rho_low", "rho_high"),
        "sigmoid": ("tau_low", "tau_high"),
        "response_ratio": _CLIP,
        "response_mismatch": (*_CLIP, "rho_low", "rho_high"),
        "response_divergence": ("token_kl", "response_kl"),
        "prefix": (*DELTAS, "prefix_delta", "prefix_delta_max", "late_weight"),
        "entropy": (*DELTAS, *_CLIP),
        "staleness": (*_CLIP, "stale_share"),
        "gamma": _GAMMA,
        "geometric": _CLIP,
        "lowest_prefix": _CLIP,
        "own": OWN_FIELDS,
    }
)


@dataclass(frozen=True)
class Objective(TermCoefficients):
    """A policy-gradient objective. Start from a preset; a field that the rule does not read keeps its default.

    Attributes:
        name: The preset it came from.
        rule: The trust region, a name in RULES: "none", "ratio" (PPO's clip), "divergence" (DPPO), ...
        divergence: Name in DIVERGENCES; a diagnostic if `rule` does not read it.
        relax: Side of the ratio clip that is lifted for tokens with mu(a) < alpha.
        delta_low: Largest divergence for negative advantages.
        delta_high: Largest divergence for positive advantages.
        eps_low: Ratio clip below 1, for negative advantages.
        eps_high: Ratio clip above 1, for positive advantages.
        alpha: Tokens with mu below this are not clipped on the relaxed side.
        ratio_cap: C, the cap on the importance weight pi/mu.
        rho_low: Smallest ratio of trainer to engine, of tokens or of complete responses.
        rho_high: Largest such ratio.
        token_kl: Largest divergence that a token of a response may have.
        response_kl: Largest mean of them over a response.
        tau_low: Steepness of the sigmoid for negative advantages.
        tau_high: Steepness of the sigmoid for positive advantages.
        prefix_delta: Mean divergence that a response may spend up to any token, at least.
        prefix_delta_max: The same at most; between both, the 90th percentile of the response's own.
        late_weight: Weight of a response's last token in that mean; the first has 1.
        stale_share: Share of a response's tokens, those nearest to the anchor, whose clip is not tightened.
        power_low: Exponent of the response's ratio in its weight, for negative advantages.
        power_high: The same for positive advantages.
        decay_low: Rate at which that weight falls exponentially with the ratio, for negative advantages.
        decay_high: The same for positive advantages.
        importance: Whose ratio pi/mu weighs a token: its own, or exp(mean log pi/mu) of the response. "rule" if
            the weight of the rule is in place of one.
        anchor: The policy that the mask compares with; the weight is pi/mu with either.
        top_k: Columns of mu that Top-K divergences use.
        include_other: Whether the mass outside the Top-K is an outcome (App. C); False is Eq. 15 as printed.
        sampled_token: How a sampled token outside the Top-K joins it.
        entropy_coef: Weight of an entropy bonus.
        ref_kl: Estimator of the KL from the reference, and with that its gradient; see `ref_kl_term`.
        own: A user's own rule, where `rule` is "own".

    Raises:
        ConfigError: A field is out of range, or two of them contradict each other.
    """

    name: str
    rule: Rule = "none"
    divergence: str = "binary_tv"
    relax: Relax = "none"
    delta_low: float = math.inf
    delta_high: float = math.inf
    eps_low: float = math.inf
    eps_high: float = math.inf
    alpha: float = 0.0
    ratio_cap: float = math.inf
    rho_low: float = 0.0
    rho_high: float = math.inf
    token_kl: float = math.inf
    response_kl: float = math.inf
    tau_low: float = 1.0
    tau_high: float = 1.0
    prefix_delta: float = math.inf
    prefix_delta_max: float = math.inf
    late_weight: float = 1.0
    stale_share: float = 1.0
    power_low: float = 1.0
    power_high: float = 1.0
    decay_low: float = 1.0
    decay_high: float = 1.0
    importance: Importance = "token"
    anchor: Anchor = "rollout"
    top_k: int = 20
    include_other: bool = True
    sampled_token: SampledToken = "union"
    entropy_coef: float = 0.0
    ref_kl: RefKl = "k3"
    own: OwnRule | None = None

    def __post_init__(self) -> None:
        problems = [*self._out_of_range(), *self._not_a_choice()]
        if not problems:
            problems = self._contradictions()
        if problems:
            raise ConfigError(problems)

    @property
    def delta(self) -> float | None:
        """The divergence threshold if it is the same for both signs, else None."""
        return self.delta_high if self.delta_high == self.delta_low else None

    @property
    def log_alpha(self) -> float:
        """Log of `alpha`, -inf for none: rarity is compared as log-probs."""
        return math.log(self.alpha) if self.alpha > 0 else -math.inf

    @property
    def needs_topk(self) -> bool:
        """Whether the loss needs the rollout's Top-K and the sampled ids."""
        return DIVERGENCES[self.divergence].over == "topk"

    @property
    def needs_responses(self) -> bool:
        """Whether the loss needs to know which tokens make up a response."""
        is_own_over_them = self.own is not None and self.own.over == "responses"
        return self.rule in _OVER_RESPONSES or self.importance == "response" or is_own_over_them

    @property
    def rule_divergence(self) -> str:
        """The divergence, as the setting of own rules names it."""
        return self.divergence

    @property
    def rule_over(self) -> str:
        """Input of a custom rule: tokens or complete responses."""
        return "tokens" if self.own is None else self.own.over

    @property
    def rule_options(self) -> dict[str, Option]:
        """Options that the config sets for a custom rule."""
        return {} if self.own is None else dict(self.own.options)

    @property
    def is_soft(self) -> bool:
        """Whether the trust region weighs tokens by other numbers than 0 and 1."""
        return self.rule in _SOFT

    @property
    def fields_in_use(self) -> tuple[str, ...]:
        """Fields that `preset` lets a user override, because they change this objective."""
        relaxed = () if self.relax == "none" else ("alpha",)
        of_topk = ("top_k", "include_other", "sampled_token") if self.needs_topk else ()
        capped = () if self.importance == "rule" else ("ratio_cap",)
        return _BY_RULE[self.rule] + relaxed + of_topk + capped + UNIVERSAL_FIELDS

    def _out_of_range(self) -> list[Problem]:
        problems: list[Problem] = []
        for field in _AT_LEAST_0:
            if not _is_number(value := getattr(self, field)) or not value >= 0:
                problems.append(self._problem(field, value, "a number >= 0"))
        if not _is_number(self.ratio_cap) or not self.ratio_cap > 0:
            problems.append(self._problem("ratio_cap", self.ratio_cap, "a number > 0, or inf for no cap"))
        for field in _FINITE:
            if not _is_number(value := getattr(self, field)) or not 0 <= value < math.inf:
                problems.append(self._problem(field, value, "a finite number >= 0"))
        if not _is_integer(self.top_k) or self.top_k < 1:
            problems.append(self._problem("top_k", self.top_k, "an integer >= 1"))
        return problems

    def _not_a_choice(self) -> list[Problem]:
        choices: dict[str, tuple[object, ...]] = {
            "rule": get_args(Rule),
            "divergence": tuple(DIVERGENCES),
            "relax": get_args(Relax),
            "importance": get_args(Importance),
            "anchor": get_args(Anchor),
            "ref_kl": get_args(RefKl),
            "include_other": (True, False),
            "sampled_token": get_args(SampledToken),
        }
        return [
            self._problem(field, getattr(self, field), "one of " + ", ".join(map(repr, allowed)))
            for field, allowed in choices.items()
            if not any(getattr(self, field) is choice or getattr(self, field) == choice for choice in allowed)
        ]

    def _contradictions(self) -> list[Problem]:
        divergence = DIVERGENCES[self.divergence]
        problems: list[Problem] = []
        for low, high in (("rho_low", "rho_high"), ("prefix_delta", "prefix_delta_max")):
            if getattr(self, low) > getattr(self, high):
                expected = f"at most {high}, {getattr(self, high):g}"
                problems.append(self._problem(low, getattr(self, low), expected))
        if (self.rule == "own") != (self.own is not None):
            problems.append(self._problem("own", self.own, "a function where rule = 'own', and none elsewhere"))
        if (self.rule in WITH_RATIO) != (self.importance == "rule"):
            expected = f"'rule' with the rules {', '.join(WITH_RATIO)}, and no other"
            problems.append(self._problem("importance", self.importance, expected))
        above_0 = {"linear": DELTAS[1:], "gamma": _GAMMA}.get(
            self.rule, ()
        )  # which divides; at 0 pi/mu = inf counts
        for field in above_0:
            if getattr(self, field) == 0:
                problems.append(self._problem(field, getattr(self, field), "a number > 0"))
        if self.stale_share > 1:
            problems.append(self._problem("stale_share", self.stale_share, "a number from 0 to 1"))
        if self.rule in _OF_TOPK and divergence.over != "topk":
            problems.append(
                self._problem("divergence", self.divergence, "a Top-K divergence, topk_tv or topk_kl")
            )
        if divergence.over == "topk" and self.anchor == "recomputed":
            problems.append(
                Problem(
                    f"{self.name}.anchor",
                    "'recomputed' with a Top-K divergence",
                    "'rollout'",
                    "Keep anchor = 'rollout', or use a binary divergence: the K tokens are known of mu alone.",
                )
            )
        if divergence.needs_other and not self.include_other:
            problems.append(
                Problem(
                    f"{self.name}.include_other",
                    f"False with {self.divergence}",
                    "True",
                    "Keep include_other = True, or use topk_tv: a KL needs outcomes that sum to 1.",
                )
            )
        return problems

    def _problem(self, field: str, found: object, expected: str) -> Problem:
        return Problem(f"{self.name}.{field}", repr(found), expected, f"Set {field} to a value in that range.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
