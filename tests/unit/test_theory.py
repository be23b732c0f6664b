"""Theorems 3.1 and 3.2 and App. B of arXiv 2602.04879, on problems whose every response is enumerated."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.errors import ConfigError
from tests.support.dppo_vectors import VECTORS
from tests.support.exact_bounds import PerformanceBound, performance_bound
from tests.support.refusals import refused

ROUNDOFF = 1e-12


def _tree(problem: dict, which: str) -> list[Tensor]:
    """The vectors' logits by prefix as [V^t, V] probabilities by depth."""
    levels = []
    for depth in range(problem["T"]):
        prefixes = itertools.product(range(problem["V"]), repeat=depth)
        rows = [problem[f"logits_{which}"][",".join(map(str, prefix))] for prefix in prefixes]
        levels.append(torch.tensor(rows, dtype=torch.float64).softmax(-1))
    return levels


@pytest.mark.parametrize("problem", VECTORS["theory"], ids=lambda problem: f"T={problem['T']}")
def test_vectors(problem: dict):
    responses = itertools.product(range(problem["V"]), repeat=problem["T"])
    values = [problem["rewards"][",".join(map(str, response))] for response in responses]
    rewards = torch.tensor(values, dtype=torch.float64)
    bound = performance_bound(_tree(problem, "pi"), _tree(problem, "mu"), rewards)
    expected = {
        "gain": problem["J_pi"] - problem["J_mu"],
        "surrogate": problem["L_prime"],
        "error": problem["Delta"],
        "max_reward": problem["xi"],
        "max_tv": problem["D_tv_max"],
        "expected_sum_tv": problem["E_sum_tv"],
        "sequence_tv": problem["seq_tv"],
        "quadratic_term": problem["bound_quadratic"],
        "linear_term": problem["bound_linear"],
        "composite_term": min(problem["bound_quadratic"], problem["bound_linear"]),
    }
    for name, value in expected.items():
        assert getattr(bound, name) == pytest.approx(value, abs=1e-12), name
    assert bound.horizon == problem["T"]


class Small:
    """A random problem: two policies and rewards."""

    def __init__(self, seed: int, horizon: int, vocab_size: int, distance: float, ends: bool):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.mu, self.pi = list[Tensor](), list[Tensor]()
        for depth in range(horizon):
            logits = 2 * normal(vocab_size**depth, vocab_size)
            if ends:  # token 0 ends a response: it is repeated for ever
                has_ended = (
                    torch.arange(vocab_size**depth) % vocab_size == 0 if depth else torch.tensor([False])
                )
                logits[has_ended] = torch.tensor([0.0] + [-math.inf] * (vocab_size - 1), dtype=torch.float64)
            self.mu.append(logits.softmax(-1))
            self.pi.append((logits + distance * normal(*logits.shape)).softmax(-1))
        self.rewards = normal(vocab_size**horizon)

    @property
    def bound(self) -> PerformanceBound:
        return performance_bound(self.pi, self.mu, self.rewards)


problems = st.builds(
    Small,
    seed=st.integers(0, 2**31),
    horizon=st.integers(1, 5),
    vocab_size=st.integers(2, 4),
    distance=st.sampled_from([0.05, 0.5, 3.0]),
    ends=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_theorems_hold(p: Small):
    found = p.bound
    assert found.gain == pytest.approx(found.surrogate - found.error, abs=ROUNDOFF)  # 3.1
    assert abs(found.error) <= found.quadratic_term + ROUNDOFF  # 3.2
    assert abs(found.error) <= found.linear_term + ROUNDOFF  # B.3
    assert found.gain >= found.surrogate - found.composite_term - ROUNDOFF
    assert found.sequence_tv <= found.expected_sum_tv + ROUNDOFF  # Lemma B.1
    if found.horizon == 1:
        assert found.error == 0 == found.quadratic_term


@settings(max_examples=30, deadline=None)
@given(problems)
def test_the_surrogate_is_the_sum_over_sampled_responses(p: Small):
    """E_mu[R sum_t (r_t - 1)] and the error of Theorem 3.1, by response; a baseline changes neither."""
    vocab_size, horizon = p.mu[0].shape[1], len(p.mu)
    surrogate = error = 0.0
    for index, response in enumerate(itertools.product(range(vocab_size), repeat=horizon)):
        ratios, probability, prefix = [], 1.0, 0
        for mu, pi, token in zip(p.mu, p.pi, response, strict=True):
            probability *= float(mu[prefix, token])
            ratios.append(float(pi[prefix, token] / mu[prefix, token]) if mu[prefix, token] > 0 else 0.0)
            prefix = prefix * vocab_size + token
        reward = float(p.rewards[index])
        surrogate += probability * reward * sum(r - 1 for r in ratios)
        error += (
            probability * reward * sum((r - 1) * (1 - math.prod(ratios[t + 1 :])) for t, r in enumerate(ratios))
        )
    assert p.bound.surrogate == pytest.approx(surrogate, abs=1e-10)
    assert p.bound.error == pytest.approx(error, abs=1e-10)
    with_baseline = performance_bound(p.pi, p.mu, p.rewards - 0.7)
    assert with_baseline.surrogate == pytest.approx(p.bound.surrogate, abs=ROUNDOFF)
    assert with_baseline.error == pytest.approx(p.bound.error, abs=ROUNDOFF)


def test_the_same_policy_gains_nothing():
    p = Small(1, 3, 3, 0.5, ends=False)
    found = performance_bound(p.mu, p.mu, p.rewards)
    assert (found.gain, found.surrogate, found.error, found.composite_term, found.sequence_tv) == (
        0,
        0,
        0,
        0,
        0,
    )


def test_invalid_trees_are_refused():
    p = Small(1, 2, 3, 0.5, ends=False)
    with refused("performance_bound.policy", "[[1, 3]]", "[[1, 3], [3, 3]]"):
        performance_bound(p.pi[:1], p.mu, p.rewards)
    with pytest.raises(ConfigError, match="one for each response"):
        performance_bound(p.pi, p.mu, p.rewards[:-1])
    with pytest.raises(ConfigError, match="a row that sums to 2"):
        performance_bound([2 * p.pi[0], p.pi[1]], p.mu, p.rewards)
    with pytest.raises(ConfigError, match="rollout_policy"):
        performance_bound([], [], p.rewards)
