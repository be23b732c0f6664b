"""A trust-region rule: its weights, the responses that it may read, and a user's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:  # an objective holds a user's rule, and the inputs hold responses
    from megatron_dppo.algorithms.inputs import TrustRegionTokens
    from megatron_dppo.algorithms.objective import Objective

RULE_DIVERGENCE, RULE_OVER = "algorithm.rule_divergence", "algorithm.rule_over"
"""Settings of a custom rule that give it log-masses or responses."""


Option = bool | int | float | str
Over = Literal["tokens", "responses"]
RuleAnswer = Float[Tensor, " T"] | tuple[Float[Tensor, " T"], Mapping[str, Float[Tensor, " T"]]]
"""Result of a custom rule: weights, and optionally values to log, by name."""
DECLARED = "OPTIONS"
"""Attribute of a function: its options by name, each with its default."""


Function = TypeVar("Function", bound=Callable[..., Any])
_WHAT_TO_DO = "Correct the function; megatron_dppo/algorithms/README.md shows one."


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses that T packed tokens make up, end to end. Each method returns a number for every token.

    Only learning tokens count: prompts and the turns of an environment are no part of a response. Sums are made
    in float64, in an order that is the response's own, and returned in the type of what is summed: every rank
    finds the same bits, and neither the packing nor an infinite neighbour shows.
    """

    lengths: Int64[Tensor, " B"]  # tokens of each; their sum is T
    is_learning: Bool[Tensor, " T"]

    @cached_property
    def index(self) -> Int64[Tensor, " T"]:
        """The response that each token belongs to."""
        which = torch.arange(self.lengths.numel(), device=self.lengths.device)
        return which.repeat_interleave(self.lengths, output_size=self.is_learning.numel())

    @cached_property
    def num_tokens(self) -> Int64[Tensor, " T"]:
        """Learning tokens of each token's response, at least 1."""
        return self._total(self.is_learning.long()).clamp(min=1)

    @cached_property
    def num_before(self) -> Int64[Tensor, " T"]:
        """Number of the response's learning tokens before each token."""
        return self._before(self.is_learning.long())

    @cached_property
    def _start(self) -> Int64[Tensor, " T"]:
        """Index of the first token of each token's response."""
        return (self.lengths.cumsum(0) - self.lengths)[self.index]

    @cached_property
    def _place(self) -> Int64[Tensor, " T"]:
        """Number of the response's packed tokens before each token, learning or not."""
        return torch.arange(self.index.numel(), device=self.index.device) - self._start

    def sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the sum over each token's response."""
        return self._total(self._counted(values)).to(values.dtype)

    def mean(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the mean over each token's response; 0 if no token in it learns."""
        return (self._total(self._counted(values)) / self.num_tokens).to(values.dtype)

    def max(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the largest value of each token's response; -inf if no token in it learns."""
        lowest = values.new_full(self.lengths.shape, -torch.inf)
        counted = torch.where(self.is_learning, values, -torch.inf)
        return lowest.scatter_reduce(0, self.index, counted, "amax")[self.index]

    def before(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the sum over the response's tokens before each token."""
        return self._before(self._counted(values)).to(values.dtype)

    def lowest_before(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the smallest value of the response's tokens before each token; inf for the first token."""
        lowest, reach = torch.where(self.is_learning, values, torch.inf), 1
        while reach < values.numel():
            lowest = torch.minimum(lowest, self._from(reach, lowest, torch.inf))
            reach *= 2
        return self._from(1, lowest, torch.inf)

    def at_rank(self, values: Float[Tensor, " T"], share: float) -> Float[Tensor, " T"]:
        """Return the smallest value that at least this share of each token's response does not exceed."""
        rank = (share * self.num_tokens.double() - 1e-9).ceil().long()  # .9 of 10 is 9, whatever the rounding
        return self._ascending(values)[self._start + (rank - 1).clamp(min=0)]

    def quantile(self, values: Float[Tensor, " T"], q: float) -> Float[Tensor, " T"]:
        """Return the q-quantile over each token's response, linear between two values."""
        ranked = self._ascending(values)
        place = q * (self.num_tokens - 1).to(values.dtype)
        lower = place.floor()
        low = ranked[self._start + lower.long()]
        high = ranked[self._start + torch.minimum(lower.long() + 1, self.num_tokens - 1)]
        return torch.where((place > lower) & (high > low), low + (place - lower) * (high - low), low)

    def _ascending(self, values: Tensor) -> Tensor:
        """Return the values in ascending order, response by response; inf for tokens that do not learn."""
        ranked = torch.where(self.is_learning, values, torch.inf)
        order = ranked.argsort(stable=True)
        return ranked[order[self.index[order].argsort(stable=True)]]

    def _counted(self, values: Tensor) -> Tensor:
        return torch.where(self.is_learning, values, 0.0).double()

    def _total(self, values: Tensor) -> Tensor:
        return self._running(values)[self._start + self.lengths[self.index] - 1]

    def _before(self, values: Tensor) -> Tensor:
        return self._from(1, self._running(values))

    def _running(self, values: Tensor) -> Tensor:
        """Return the sums up to and with each token, in log2(T) doublings of how far back they reach."""
        reach = 1
        while reach < values.numel():
            values = values + self._from(reach, values)
            reach *= 2
        return values

    def _from(self, distance: int, values: Tensor, outside: float = 0) -> Tensor:
        """Return the value `distance` tokens before each token; `outside` if its response has no such token."""
        earlier = values.new_zeros(distance), values[:-distance]
        return torch.where(self._place >= distance, torch.cat(earlier)[: values.numel()], outside)


def require_lengths(lengths: Tensor, num_tokens: int, rule: str) -> None:
    """Raise unless the lengths are valid for T tokens; the message names the rule that reads them.

    Raises:
        ConfigError: The lengths are not a vector of integers, one is negative, or they do not sum to T.
    """
    is_vector = lengths.dim() == 1 and not lengths.is_floating_point() and lengths.dtype != torch.bool
    if is_vector and not bool((lengths < 0).any()) and int(lengths.sum()) == num_tokens:
        return
    found = f"shape {list(lengths.shape)}, {lengths.dtype}"
    if is_vector:
        shown = ", ".join(str(int(n)) for n in lengths[:8]) + (", ..." if lengths.numel() > 8 else "")
        found = f"{shown} (sum {int(lengths.sum())})"
    expected = f"[B] integers >= 0 that sum to {num_tokens}, the tokens of log_probs"
    action = "Give the number of packed tokens of each response, in their order, prompts included."
    raise ConfigError(Problem(f"PolicyLossInputs.response_lengths of {rule}", found, expected, action))


@dataclass(frozen=True)
class TrustRegionRule:
    """A registered trust-region rule."""

    weigh: Callable[[Objective, TrustRegionTokens], Tensor]  # [T] factor of each token's update; 0: dropped
    id: int  # its number in DppoRule of kernels/csrc/capi.h, or one that neither that nor another rule has


def masking(
    drops: Callable[[Objective, TrustRegionTokens], Tensor],
) -> Callable[[Objective, TrustRegionTokens], Tensor]:
    """Turn a function that returns the tokens to drop, [T] bool, into a rule that returns weights 0 or 1."""

    def weigh(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
        return torch.where(drops(objective, tokens), 0.0, torch.ones_like(tokens.log_probs))

    return weigh


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
        """Return the weight of each token, checked; one device synchronisation.

        Raises:
            ConfigError: The function returned no tensor [T] of numbers, or a learning token got one that is
                negative or not finite.
        """
        weight, _ = self._answer(tokens)
        return self._checked(tokens, weight, "the weight of each token", "finite weights >= 0", 0.0)

    def values(self, tokens: TrustRegionTokens) -> dict[str, Float[Tensor, " T"]]:
        """Return the values that the function returned by name with the weights, checked as they are; or none.

        Raises:
            ConfigError: The function returned something other than a mapping from names to tensors [T], or a
                value of a learning token is not finite.
        """
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
