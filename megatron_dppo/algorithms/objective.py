"""An objective: which tokens learn, and how much each one weighs. Plain numbers; the tensors are `loss.py`'s.

Every algorithm of the paper (arXiv 2602.04879) is one of these, for they share the gradient of Eq. 23,
sum_t M_t min(r_t, C) A_t grad log pi(y_t), and differ in the mask M and the cap C alone.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_dppo.algorithms.divergence import DIVERGENCES, SampledToken
from megatron_dppo.errors import ConfigError, Problem

Rule = Literal["none", "ratio", "divergence", "negative"]
Relax = Literal["none", "high", "low", "both"]
Anchor = Literal["rollout", "recomputed"]

DELTAS = ("delta", "delta_low", "delta_high")
UNIVERSAL_FIELDS = ("ratio_cap", "anchor", "entropy_coef")


@dataclass(frozen=True)
class Objective:
    """A policy-gradient objective. Start from a preset; a field that the rule does not read keeps its default.

    Attributes:
        name: The preset it came from.
        rule: The trust region: "none", "ratio" (PPO's clip), "divergence" (DPPO) or "negative" (section 5.3).
        divergence: Name in DIVERGENCES; a diagnostic where `rule` is not "divergence".
        relax: Side of the ratio clip that is lifted where mu(a) < alpha.
        delta_low: Largest divergence where the advantage is negative.
        delta_high: Largest divergence where the advantage is positive.
        eps_low: Ratio clip below 1, for negative advantages.
        eps_high: Ratio clip above 1, for positive advantages.
        alpha: Tokens with mu below this are not clipped on the relaxed side.
        ratio_cap: C, the cap on the importance weight pi/mu.
        anchor: The policy that the mask compares with; the weight is pi/mu with either.
        top_k: Columns of mu that Top-K divergences use.
        include_other: Whether the mass outside the Top-K is an outcome (App. C); False is Eq. 15 as printed.
        sampled_token: How a sampled token outside the Top-K joins it.
        entropy_coef: Weight of an entropy bonus.

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
    anchor: Anchor = "rollout"
    top_k: int = 20
    include_other: bool = True
    sampled_token: SampledToken = "union"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        problems = [*self._out_of_range(), *self._not_a_choice()]
        if not problems:
            problems = self._contradictions()
        if problems:
            raise ConfigError(problems)

    @property
    def delta(self) -> float | None:
        """The divergence threshold of both signs; none where they differ."""
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
    def fields_in_use(self) -> tuple[str, ...]:
        """What `preset` lets a user override: the fields that change what this objective does."""
        by_rule: dict[Rule, tuple[str, ...]] = {
            "none": (),
            "ratio": ("eps_low", "eps_high") + (() if self.relax == "none" else ("alpha",)),
            "divergence": DELTAS + (("top_k", "include_other", "sampled_token") if self.needs_topk else ()),
            "negative": ("delta", "delta_low"),
        }
        return by_rule[self.rule] + UNIVERSAL_FIELDS

    def _out_of_range(self) -> list[Problem]:
        problems: list[Problem] = []
        for field in ("delta_low", "delta_high", "eps_low", "eps_high", "alpha"):
            if not _is_number(value := getattr(self, field)) or not value >= 0:
                problems.append(self._problem(field, value, "a number >= 0"))
        if not _is_number(self.ratio_cap) or not self.ratio_cap > 0:
            problems.append(self._problem("ratio_cap", self.ratio_cap, "a number > 0, or inf for no cap"))
        if not _is_number(self.entropy_coef) or not 0 <= self.entropy_coef < math.inf:
            problems.append(self._problem("entropy_coef", self.entropy_coef, "a finite number >= 0"))
        if not _is_integer(self.top_k) or self.top_k < 1:
            problems.append(self._problem("top_k", self.top_k, "an integer >= 1"))
        return problems

    def _not_a_choice(self) -> list[Problem]:
        choices: dict[str, tuple[object, ...]] = {
            "rule": get_args(Rule),
            "divergence": tuple(DIVERGENCES),
            "relax": get_args(Relax),
            "anchor": get_args(Anchor),
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
