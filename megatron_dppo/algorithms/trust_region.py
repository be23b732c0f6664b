"""Inputs and protocol of a trust-region rule."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.responses import Responses
from megatron_dppo.errors import ConfigError, Problem

RULE_DIVERGENCE, RULE_OVER = "algorithm.rule_divergence", "algorithm.rule_over"
"""Settings of a custom rule that give it log-masses or responses."""


@dataclass(frozen=True, eq=False)
class TrustRegionTokens:
    """Inputs of a trust-region rule, without gradient; log-probs are <= 0.

    Rows that do not learn are neutral: log-probs and advantage 0, divergence 0.
    """

    log_probs: Tensor  # [T] log pi(a)
    anchor_log_probs: Tensor  # [T] of the policy that the rule compares with: mu, or pi' if recomputed
    rollout_log_probs: Tensor  # [T] log mu(a)
    advantages: Tensor  # [T]
    divergence: Tensor  # [T] of pi from the anchor, the one that the objective names
    loss_mask: Tensor  # [T] bool: the tokens that learn
    outcomes: tuple[Tensor, Tensor] | None = None  # log-masses of a Top-K divergence; None for others
    responses: Responses | None = None  # for rules over complete responses

    @property
    def is_above(self) -> Tensor:
        """[T] bool: pi(a) is above the anchor's, read off log-probs, which resolve what rounds to 1."""
        return self.log_probs > self.anchor_log_probs

    @property
    def is_below(self) -> Tensor:
        """[T] bool: pi(a) is below the anchor's."""
        return self.log_probs < self.anchor_log_probs

    @property
    def moves_away(self) -> Tensor:
        """[T] bool: the update would push pi(a) further from the anchor; False if A = 0."""
        return by_sign(self.advantages, self.is_above, self.is_below)

    @property
    def moves_back(self) -> Tensor:
        """[T] bool: the update would bring pi(a) back to the anchor; False if A = 0."""
        return by_sign(self.advantages, self.is_below, self.is_above)

    def of_sign(self, of_positive: float, of_negative: float) -> Tensor:
        """Return [T]: `of_positive` if A > 0, else `of_negative`."""
        return torch.where(
            self.advantages > 0,
            self.log_probs.new_full((), of_positive),
            self.log_probs.new_full((), of_negative),
        )

    @property
    def log_masses(self) -> Tensor:
        """[T, outcomes] log pi of a Top-K divergence's outcomes, in the order of `topk_partition`.

        Raises:
            ConfigError: The rule is a custom one, and its divergence reads only the sampled token.
        """
        return self._of_outcomes[0]

    @property
    def anchor_log_masses(self) -> Tensor:
        """[T, outcomes] log mu of the same outcomes. Raises what `log_masses` does."""
        return self._of_outcomes[1]

    @property
    def _of_outcomes(self) -> tuple[Tensor, Tensor]:
        if self.outcomes is None:
            found = "a divergence of only the sampled token, but the rule reads log_masses"
            expected, action = "'topk_tv' or 'topk_kl'", "Set it to one of them."
            raise ConfigError(Problem(RULE_DIVERGENCE, found, expected, action))
        return self.outcomes

    @property
    def whole_responses(self) -> Responses:
        """The responses, for a rule that reads complete responses.

        Raises:
            ConfigError: The rule is a custom one, and `rule_over` is not "responses".
        """
        if self.responses is None:
            found = "'tokens', but the rule reads complete responses"
            raise ConfigError(Problem(RULE_OVER, found, "'responses'", "Set it so."))
        return self.responses


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


def by_sign(advantages: Tensor, of_positive: Tensor, of_negative: Tensor) -> Tensor:
    """Choose [T] bool by the sign of A; False if A = 0."""
    return ((advantages > 0) & of_positive) | ((advantages < 0) & of_negative)
