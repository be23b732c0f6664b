"""The paper's performance bounds, exact, on problems small enough to enumerate (Theorems 3.1 and 3.2, App. B).

A policy over responses of T tokens from a vocabulary of V is its tree of conditional distributions: at depth t
a tensor [V^t, V] of probabilities, the row of a prefix (y_1 .. y_t) being its number in base V. Rewards are one
tensor [V^T], of whole responses. Shorter responses are those that end in a token which, once sampled, is
sampled for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem

SUM_TOLERANCE = 1e-6  # of a row of probabilities from 1


@dataclass(frozen=True)
class PerformanceBound:
    """What a policy pi gains over the policy mu that sampled, and how far its surrogate may be from that."""

    gain: float  # J(pi) - J(mu)
    surrogate: float  # L'(pi) = E_mu[R sum_t (r_t - 1)], with r_t = pi / mu of token t
    error: float  # Delta of Theorem 3.1: gain = surrogate - error
    max_reward: float  # xi = max |R|
    horizon: int  # T
    max_tv: float  # largest total variation of pi from mu at a prefix that mu reaches
    expected_sum_tv: float  # E_mu[sum_t TV(mu, pi at prefix t)]
    sequence_tv: float  # total variation of the two distributions of whole responses

    @property
    def quadratic_term(self) -> float:
        """2 xi T (T - 1) max TV^2, at least |error| (Theorem 3.2)."""
        return 2 * self.max_reward * self.horizon * (self.horizon - 1) * self.max_tv**2

    @property
    def linear_term(self) -> float:
        """4 xi E_mu[sum_t TV], at least |error| (App. B.3)."""
        return 4 * self.max_reward * self.expected_sum_tv

    @property
    def composite_term(self) -> float:
        """The smaller of both (App. B.3): the gain is at least the surrogate less this."""
        return min(self.quadratic_term, self.linear_term)


def performance_bound(
    policy: Sequence[Tensor], rollout_policy: Sequence[Tensor], rewards: Tensor
) -> PerformanceBound:
    """Every term of the bounds by enumeration of all V^T responses, in float64.

    The error is summed from what it is made of, the prefixes that pi reaches more or less often than mu, and
    not taken as a difference: that gain and surrogate differ by it is Theorem 3.1, and left to be seen. A token
    that mu never samples counts in the surrogate with what mu would have earned after it.

    Args:
        policy: pi, [V^t, V] probabilities for each depth t from 0 to T - 1.
        rollout_policy: mu, of the same shapes.
        rewards: [V^T].

    Raises:
        ConfigError: The shapes are no trees of the same size, or a row is no distribution.
    """
    pi, mu = ([level.double() for level in levels] for levels in (policy, rollout_policy))
    rewards = rewards.double()
    _require_trees(pi, mu, rewards)
    values = _values(mu, rewards)
    reach_pi, reach_mu = _reach(pi), _reach(mu)
    surrogate = error = expected_sum_tv = max_tv = 0.0
    for depth, (p, m) in enumerate(zip(pi, mu, strict=True)):
        children = values[depth + 1].view_as(m)
        advantage = ((p - m) * children).sum(1)
        tv = (p - m).abs().sum(1) / 2
        surrogate += float((reach_mu[depth] * advantage).sum())
        error += float(((reach_mu[depth] - reach_pi[depth]) * advantage).sum())
        expected_sum_tv += float((reach_mu[depth] * tv).sum())
        max_tv = max(max_tv, float(tv[reach_mu[depth] > 0].max()))
    return PerformanceBound(
        gain=float((reach_pi[-1] * rewards).sum() - (reach_mu[-1] * rewards).sum()),
        surrogate=surrogate,
        error=error,
        max_reward=float(rewards.abs().max()),
        horizon=len(mu),
        max_tv=max_tv,
        expected_sum_tv=expected_sum_tv,
        sequence_tv=float((reach_pi[-1] - reach_mu[-1]).abs().sum() / 2),
    )


def _reach(levels: Sequence[Tensor]) -> list[Tensor]:
    """Probability of each prefix, [V^t] for each t from 0 to T."""
    reach = [torch.ones(1, dtype=torch.float64)]
    for level in levels:
        reach.append((reach[-1][:, None] * level).flatten())
    return reach


def _values(levels: Sequence[Tensor], rewards: Tensor) -> list[Tensor]:
    """Expected reward after each prefix, [V^t] for each t from 0 to T."""
    values = [rewards]
    for level in reversed(levels):
        values.append((level * values[-1].view_as(level)).sum(1))
    return values[::-1]


def _require_trees(pi: Sequence[Tensor], mu: Sequence[Tensor], rewards: Tensor) -> None:
    width = mu[0].shape[-1] if mu else 0
    expected = [[width**depth, width] for depth in range(len(mu))]
    shapes = {"policy": [list(p.shape) for p in pi], "rollout_policy": [list(m.shape) for m in mu]}
    problems = [
        Problem(f"performance_bound.{name}", str(found), str(expected), "Give one row of V for each prefix.")
        for name, found in shapes.items()
        if found != expected or not mu
    ]
    if not problems and list(rewards.shape) != [width ** len(mu)]:
        found = str(list(rewards.shape))
        wanted = f"[{width ** len(mu)}], one for each response"
        problems.append(Problem("performance_bound.rewards", found, wanted, "Give V^T rewards."))
    if not problems:
        problems = [
            Problem(
                f"performance_bound.{name}",
                f"a row that sums to {float(total):g}",
                "probabilities",
                "Use softmax.",
            )
            for name, levels in (("policy", pi), ("rollout_policy", mu))
            for level in levels
            for total in [_worst_sum(level)]
            if not abs(total - 1) <= SUM_TOLERANCE or bool((level < 0).any())
        ]
    if problems:
        raise ConfigError(problems)


def _worst_sum(level: Tensor) -> float:
    sums = level.sum(1)
    return float(sums[(sums - 1).abs().argmax()])
