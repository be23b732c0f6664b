"""A user's own trust-region rule: a function named in the config, which trains as any preset does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, did_you_mean

Option = bool | int | float | str
Over = Literal["tokens", "responses"]

DECLARED = "OPTIONS"
"""Attribute of a function: its options by name, each with its default."""

Function = TypeVar("Function", bound=Callable[..., Any])

_WHAT_TO_DO = "Correct the function; megatron_dppo/algorithms/README.md shows one."


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

    Raises:
        ConfigError: The rule declares its options, and one is unknown or of another type.
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


@dataclass(frozen=True)
class OwnRule:
    """A function of the user's, and the numbers that the config gives it."""

    name: str  # "package.module:function"
    function: Callable[[Any, Mapping[str, Option]], Tensor] = field(compare=False)
    """(TrustRegionTokens, options) -> [T]: the factor >= 0 of each token's update; bool is 0 or 1."""
    options: tuple[tuple[str, Option], ...] = ()
    over: Over = "tokens"  # "responses" if the rule needs complete responses

    def takes(self, option: str) -> bool:
        """Whether the function may read an option of that name: any, unless it declares which."""
        return option in getattr(self.function, DECLARED, (option,))

    def weigh(self, tokens: Any) -> Tensor:
        """Return the weight of each token, [T], checked; one device synchronisation.

        Args:
            tokens: TrustRegionTokens.

        Raises:
            ConfigError: The function returned no tensor [T] of numbers, or a learning token got one that is
                negative or not finite.
        """
        found: Any = self.function(tokens, dict(self.options))
        shape = tokens.log_probs.shape
        if not isinstance(found, Tensor) or found.shape != shape or found.is_complex():
            what = f"{type(found).__name__}"
            if isinstance(found, Tensor):
                what = f"a tensor of shape {list(found.shape)}, {found.dtype}"
            expected = f"a real tensor [{shape[0]}], the weight of each token"
            raise ConfigError(Problem(self.name, what, expected, _WHAT_TO_DO))
        weight = torch.where(tokens.loss_mask, found.detach().to(tokens.log_probs), 0.0)
        is_bad = ~(weight.isfinite() & (weight >= 0))
        if bool(is_bad.any()):
            first = int(is_bad.nonzero()[0, 0])
            what = f"{float(weight[first]):g} for token {first} ({int(is_bad.sum())} learning tokens in all)"
            raise ConfigError(Problem(self.name, what, "finite weights >= 0", _WHAT_TO_DO))
        return weight
