"""A user's own trust-region rule: a function, its options, and its objective."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dppo.algorithms.inputs import TrustRegionTokens
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.runtime.user_code import import_named, problem_with_path

Option = bool | int | float | str
Over = Literal["tokens", "responses"]
RuleAnswer = Float[Tensor, " T"] | tuple[Float[Tensor, " T"], Mapping[str, Float[Tensor, " T"]]]
"""Result of a custom rule: weights, and optionally values to log, by name."""
OWN_FIELDS = ("rule_divergence", "rule_over", "rule_options")
DECLARED = "OPTIONS"
"""Attribute of a function: its options by name, each with its default."""


Function = TypeVar("Function", bound=Callable[..., Any])
_WHAT_TO_DO = "Correct the function; megatron_dppo/algorithms/README.md shows one."


@dataclass(frozen=True)
class OwnRule:
    """A function of the user's, and the numbers that the config gives it."""

    name: str  # "package.module:function"
    function: Callable[[TrustRegionTokens, Mapping[str, Option]], RuleAnswer] = field(compare=False)
    """Returns the factor >= 0 of each token's update, where bool is 0 or 1, and optionally named values [T]."""
    options: tuple[tuple[str, Option], ...] = ()
    over: Over = "tokens"  # "responses" if the rule needs complete responses

    def takes(self, option: str) -> bool:
        """Whether the function may read an option of that name: any, unless it declares which."""
        return option in getattr(self.function, DECLARED, (option,))

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        """Return the weight of each token, checked; one device synchronisation."""
        weight, _ = self._answer(tokens)
        return self._checked(tokens, weight, "the weight of each token", "finite weights >= 0", 0.0)

    def values(self, tokens: TrustRegionTokens) -> dict[str, Float[Tensor, " T"]]:
        """Return the values that the function returned by name with the weights, checked; or none."""
        _, values = self._answer(tokens)
        return {
            name: self._checked(tokens, value, f"the value {name} of each token", f"finite {name}", -torch.inf)
            for name, value in values.items()
        }

    def _answer(self, tokens: TrustRegionTokens) -> tuple[Any, Mapping[str, Any]]:
        """Return the weights and the named values that the function returns, neither checked."""
        found: Any = self.function(tokens, dict(self.options))
        nothing: dict[str, Any] = {}
        parts: tuple[Any, ...] = (
            cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found, nothing)
        )
        named: Any = parts[1] if len(parts) == 2 else None
        values = cast("Mapping[Any, Any]", named) if isinstance(named, Mapping) else {None: None}
        if not all(isinstance(name, str) and name.isidentifier() for name in values):
            expected = "weights, or a pair of weights and a mapping from names to values of the tokens"
            raise ConfigError(Problem(self.name, f"a tuple of {len(parts)}", expected, _WHAT_TO_DO))
        return parts[0], values

    def _checked(
        self, tokens: TrustRegionTokens, found: Any, what: str, expected: str, lowest: float
    ) -> Float[Tensor, " T"]:
        """Return the function's numbers, 0 for rows that do not learn; raise if one is missing or invalid."""
        shape = tokens.log_probs.shape
        if not isinstance(found, Tensor) or found.shape != shape or found.is_complex():
            kind = f"{type(found).__name__}"
            if isinstance(found, Tensor):
                kind = f"a tensor of shape {list(found.shape)}, {found.dtype}"
            raise ConfigError(Problem(self.name, kind, f"a real tensor [{shape[0]}], {what}", _WHAT_TO_DO))
        numbers = torch.where(tokens.loss_mask, found.detach().to(tokens.log_probs), 0.0)
        is_bad = ~(numbers.isfinite() & (numbers >= lowest))
        if bool(is_bad.any()):
            first = int(is_bad.nonzero()[0, 0])
            where = f"{float(numbers[first]):g} for token {first} ({int(is_bad.sum())} learning tokens in all)"
            raise ConfigError(Problem(self.name, where, expected, _WHAT_TO_DO))
        return numbers


def rule_options(**defaults: Option) -> Callable[[Function], Function]:
    """Declare the options of an own rule with their defaults: others are refused, and each one is there.

    Example: `@rule_options(delta=0.2)` above `def fades_out(tokens, options)`.
    """

    def declare(function: Function) -> Function:
        setattr(function, DECLARED, MappingProxyType(dict(defaults)))
        return function

    return declare


def complete_options(name: str, function: Any, given: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options that a rule gets: the given ones, and the defaults of those that it declares.

    Args:
        name: Name of the rule, for messages.
        function: Custom rule, with or without declared options.
        given: Options from the config.
    """
    attribute: Any = getattr(function, DECLARED, None)
    if attribute is None:
        return dict(given)
    declared = cast("Mapping[str, Any]", attribute)
    if not isinstance(attribute, Mapping) or not all(isinstance(x, Option) for x in declared.values()):
        found, expected = f"{DECLARED} = {attribute!r}", "a mapping of names to numbers, texts or booleans"
        raise ConfigError(Problem(name, found, expected, "Declare them with @rule_options(name=default)."))
    problems: list[Problem] = []
    for option, value in given.items():
        if option not in declared:
            expected = f"options of {name}: {', '.join(declared) or 'none'}"
            action = did_you_mean(option, declared, "Choose one of these, or leave it out.")
            problems.append(Problem("algorithm.rule_options", repr(option), expected, action))
        elif _kind(value) != _kind(declared[option]):
            found, expected = f"{option} = {value!r}", f"a {_kind(declared[option])}, as {declared[option]!r}"
            action = "Give it as the rule declares it."
            problems.append(Problem("algorithm.rule_options", found, expected, action))
    if problems:
        raise ConfigError(problems)
    return {**declared, **given}


def _kind(value: Option) -> str:
    return "boolean" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


@dataclass(frozen=True, kw_only=True)
class Own(Objective):
    """Weigh by the user's function; see `OwnRule`."""

    rule: ClassVar[str] = "own"
    id: ClassVar[int] = 13
    reads_mu: ClassVar[bool] = True

    function: OwnRule

    @property
    def own(self) -> OwnRule:
        return self.function

    @property
    def own_fields(self) -> tuple[str, ...]:
        return OWN_FIELDS

    @property
    def rule_divergence(self) -> str:
        """The divergence, as the setting names it."""
        return self.divergence

    @property
    def rule_over(self) -> Over:
        """Input of the rule: tokens or complete responses."""
        return self.function.over

    @property
    def rule_options(self) -> dict[str, Option]:
        return dict(self.function.options)

    @property
    def needs_responses(self) -> bool:
        return super().needs_responses or self.function.over == "responses"

    def bounded_signs(self) -> tuple[bool, bool]:
        return True, True

    def weigh(self, tokens: TrustRegionTokens) -> Float[Tensor, " T"]:
        return self.function.weigh(tokens)


def own_objective(
    name: str,
    *,
    rule_divergence: str = "binary_tv",
    rule_over: Over = "tokens",
    rule_options: Mapping[str, Option] | None = None,
) -> Own:
    """Return the objective of a user's own rule, with the function that its name imports."""
    problem = problem_with_path("algorithm.preset", name, "package.module:function")
    if problem is not None:
        raise ConfigError(problem)
    function = import_named("algorithm.preset", name)
    options = complete_options(name, function, rule_options or {})
    rule = OwnRule(name, function, tuple(sorted(options.items())), rule_over)
    return Own(name=name, divergence=rule_divergence, function=rule)
