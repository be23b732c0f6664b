"""A user's own trust-region rule: a function named in the config, which trains as any preset does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem

Option = bool | int | float | str
Over = Literal["tokens", "responses"]

_WHAT_TO_DO = "Correct the function; megatron_dppo/algorithms/README.md shows one."


@dataclass(frozen=True)
class OwnRule:
    """A function of the user's, and the numbers that the config gives it."""

    name: str  # "package.module:function"
    function: Callable[[Any, Mapping[str, Option]], Tensor] = field(compare=False)
    """(TrustRegionTokens, options) -> [T]: the factor >= 0 of each token's update; bool is 0 or 1."""
    options: tuple[tuple[str, Option], ...] = ()
    over: Over = "tokens"  # "responses" where it needs to see whole ones

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
