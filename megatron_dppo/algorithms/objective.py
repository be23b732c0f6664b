"""An objective: which tokens learn, and how much each one weighs.

Every algorithm of the paper (arXiv 2602.04879) is one of these, for they share the gradient of Eq. 23,
sum_t M_t min(r_t, C) A_t grad log pi(y_t), and differ only in the mask M and the cap C. Others weigh tokens
(M is a number), replace r by the ratio of complete responses, or add the terms of `loss_terms.py`.

A trust-region rule is a subclass of `Objective`, in `paper_rules.py`, `token_rules.py` or `response_rules.py`:
its weight, its fields with their bounds, its number and its presets. No other place lists rules or fields.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from megatron_dppo.algorithms.divergence import DIVERGENCES, SampledToken
from megatron_dppo.algorithms.fields import Number, choice, number
from megatron_dppo.algorithms.inputs import TrustRegionTokens
from megatron_dppo.algorithms.loss_terms import LOSS_TERMS, RefKl, TermCoefficients
from megatron_dppo.errors import ConfigError, Problem

if TYPE_CHECKING:  # a user's own rule is an objective
    from megatron_dppo.algorithms.own_rule import OwnRule

Importance = Literal["token", "response", "rule"]
Anchor = Literal["rollout", "recomputed"]

DELTAS = ("delta", "delta_low", "delta_high")
UNIVERSAL_FIELDS = ("anchor", "entropy_coef", *LOSS_TERMS, "ref_kl")
_OF_TOPK = ("top_k", "include_other", "sampled_token")
registered_rules: dict[str, type["Objective"]] = {}
registered_presets: dict[str, "Objective"] = {}
_CHOICES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "importance": get_args(Importance),
        "anchor": get_args(Anchor),
        "ref_kl": get_args(RefKl),
        "include_other": (True, False),
        "sampled_token": get_args(SampledToken),
    }
)


@dataclass(frozen=True)
class Objective(TermCoefficients):
    """A policy-gradient objective; each subclass adds a trust-region rule and its fields. Start from a preset.

    Attributes:
        name: The preset it came from.
        divergence: Name in DIVERGENCES; a diagnostic if the rule does not read it.
        importance: Whose ratio pi/mu weighs a token: its own, or exp(mean log pi/mu) of the response. "rule" if
            the weight of the rule is in place of one.
        anchor: The policy that the mask compares with; the weight is pi/mu with either.
        top_k: Columns of mu that Top-K divergences use.
        include_other: Whether the mass outside the Top-K is an outcome (App. C); False is Eq. 15 as printed.
        sampled_token: How a sampled token outside the Top-K joins it.
        entropy_coef: Weight of an entropy bonus.

    Raises:
        ConfigError: A field is out of range, or two of them contradict each other.
    """

    rule: ClassVar[str]
    """Name of the rule."""
    id: ClassVar[int]
    """Its number in DppoRule of kernels/csrc/capi.h, or one that neither that nor another rule has."""
    over_responses: ClassVar[bool] = False
    """Whether the rule reads complete responses."""
    of_topk: ClassVar[bool] = False
    """Whether the rule reads the outcomes of a Top-K divergence."""
    replaces_ratio: ClassVar[bool] = False
    """Whether the rule's weight is in place of pi/mu, which goes with importance = "rule"."""
    reads_anchor: ClassVar[bool] = True
    """Whether the rule compares with the anchor at all."""
    reads_mu: ClassVar[bool] = False
    """Whether the rule compares with mu if the anchor is recomputed."""
    choices: ClassVar[Mapping[str, tuple[object, ...]]] = _CHOICES
    """Allowed values of fields that are names or switches."""

    name: str
    divergence: str = "binary_tv"
    importance: Importance = "token"
    anchor: Anchor = choice(
        "Policy that the mask compares with: the rollout policy, or the trainer's recomputed log-probs.",
        "rollout",
    )
    top_k: Annotated[int, Field(ge=1, le=64)] = choice(
        "K of topk_* divergences: most probable tokens of mu.", 20
    )
    include_other: bool = choice("topk_*: count the mass outside the K tokens as one more outcome.", True)
    sampled_token: SampledToken = choice(
        'topk_*: "union" adds the sampled token to the K tokens, "replace" replaces the last of them.', "union"
    )
    entropy_coef: float = number("Weight of the entropy bonus.", 0.0, is_finite=True)

    def __init_subclass__(cls) -> None:
        if "rule" in vars(cls):
            registered_rules[cls.rule] = cls

    def __post_init__(self) -> None:
        problems = [*self._out_of_range(), *self._not_a_choice()]
        if not problems:
            problems = self.contradictions()
        if problems:
            raise ConfigError(problems)

    def drops(self, tokens: TrustRegionTokens) -> Bool[Tensor, " T"]:
        """Return the tokens whose update the rule drops."""
        raise NotImplementedError

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        """Return the factor of each token's update: 0 drops it, 1 keeps it, below 0 reverses it."""
        return torch.where(self.drops(tokens), 0.0, torch.ones_like(tokens.log_probs))

    @property
    def is_soft(self) -> bool:
        """Whether the trust region weighs tokens by other numbers than 0 and 1."""
        return type(self).weigh is not Objective.weigh

    @property
    def own(self) -> "OwnRule | None":
        """The user's own rule; None if this is a rule of the package."""
        return None

    @property
    def rule_options(self) -> dict[str, bool | int | float | str]:
        """Options that the config sets for the user's own rule."""
        return {}

    @property
    def delta(self) -> float | None:
        """The divergence threshold if it is the same for both signs, else None."""
        found = {getattr(self, side) for side in DELTAS[1:] if hasattr(self, side)}
        return found.pop() if len(found) == 1 else None

    @property
    def needs_topk(self) -> bool:
        """Whether the loss needs the rollout's Top-K and the sampled ids."""
        return DIVERGENCES[self.divergence].over == "topk"

    @property
    def needs_responses(self) -> bool:
        """Whether the loss needs to know which tokens make up a response."""
        return self.over_responses or self.importance == "response"

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Fields of the rule that change this objective, `delta` among them."""
        known = {each.name for each in fields(Objective)}
        found = tuple(each.name for each in fields(self) if each.name not in known and each.metadata)
        return ("delta", *found) if DELTAS[1] in found else found

    @property
    def fields_in_use(self) -> tuple[str, ...]:
        """Fields that `preset` lets a user override, because they change this objective."""
        of_topk = _OF_TOPK if self.needs_topk else ()
        capped = () if self.importance == "rule" else ("ratio_cap",)
        return self.own_fields + of_topk + capped + UNIVERSAL_FIELDS

    @property
    def numbers(self) -> dict[str, Number]:
        """Numbers among the fields in use, and what each may be."""
        found = _numbers(self)
        return {name: found[name] for name in self.fields_in_use if name in found}

    def bound_of(self, field: str) -> float | None:
        """Return the bound of what a threshold is compared with, or None if the field is no threshold."""
        bound = self.numbers[field].bounds
        return DIVERGENCES[self.divergence].at_most if bound == "divergence" else bound

    def bounded_signs(self) -> tuple[bool, bool]:
        """Return whether the trust region bounds updates with negative advantages, and with positive ones."""
        thresholds = [name for name, each in self.numbers.items() if each.bounds is not None]
        finite = [name for name in thresholds if getattr(self, name) < math.inf]
        return any(not n.endswith("_high") for n in finite), any(not n.endswith("_low") for n in finite)

    def contradictions(self) -> list[Problem]:
        """Return the problems of fields that contradict each other; each one is in its range."""
        divergence, problems = DIVERGENCES[self.divergence], list[Problem]()
        if self.replaces_ratio != (self.importance == "rule"):
            problems.append(
                self.problem("importance", "'rule'" if self.replaces_ratio else "'token' or 'response'")
            )
        if self.of_topk and divergence.over != "topk":
            problems.append(self.problem("divergence", "a Top-K divergence, topk_tv or topk_kl"))
        if divergence.over == "topk" and self.anchor == "recomputed":
            found = "'recomputed' with a Top-K divergence"
            action = "Keep anchor = 'rollout', or use a binary divergence: the K tokens are known of mu alone."
            problems.append(Problem(f"{self.name}.anchor", found, "'rollout'", action))
        if divergence.needs_other and not self.include_other:
            action = "Keep include_other = True, or use topk_tv: a KL needs outcomes that sum to 1."
            problems.append(
                Problem(f"{self.name}.include_other", f"False with {self.divergence}", "True", action)
            )
        return problems

    def crossed(self, low: str, high: str) -> list[Problem]:
        """Return a problem if the lower bound of a range is above its upper one."""
        if getattr(self, low) <= getattr(self, high):
            return []
        return [self.problem(low, f"at most {high}, {getattr(self, high):g}")]

    def problem(self, field: str, expected: str) -> Problem:
        """Return the problem of a field's value."""
        found = repr(getattr(self, field))
        return Problem(f"{self.name}.{field}", found, expected, f"Set {field} to a value in that range.")

    def _out_of_range(self) -> list[Problem]:
        expected = {name: known.refusal(getattr(self, name)) for name, known in _numbers(self).items()}
        problems = [self.problem(name, what) for name, what in expected.items() if what is not None]
        if type(self.top_k) is not int or self.top_k < 1:
            problems.append(self.problem("top_k", "an integer >= 1"))
        return problems

    def _not_a_choice(self) -> list[Problem]:
        return [
            self.problem(name, "one of " + ", ".join(map(repr, values)))
            for name, values in {"divergence": tuple(DIVERGENCES), **self.choices}.items()
            if not any(getattr(self, name) is value or getattr(self, name) == value for value in values)
        ]


def _numbers(objective: Objective) -> dict[str, Number]:
    return {each.name: each.metadata["number"] for each in fields(objective) if "number" in each.metadata}


def presets(*objectives: Objective) -> tuple[Objective, ...]:
    """Add presets, in the order of tables, and return them. A rule's module calls this after its class."""
    for objective in objectives:
        assert objective.name not in registered_presets, f"two presets have the name {objective.name}"
        registered_presets[objective.name] = objective
    return objectives
