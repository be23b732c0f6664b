"""The bound's terms on batches, and whether a threshold stands above the engines' noise."""

import itertools
import math

import pytest
import torch
from exact_bounds import performance_bound
from torch import Tensor

from megatron_dppo.metrics.alarms import NOISE_LIMIT, noise_warning
from megatron_dppo.metrics.bound import add_bound_of_responses, add_bound_of_tokens, bound_terms
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.mismatch import add_noise
from megatron_dppo.types import Microbatch

HORIZON = 3


def _microbatch(log_pi: Tensor, log_mu: Tensor, advantages: Tensor) -> tuple[Tensor, Microbatch]:
    """Responses [N, T] behind a prompt of one token each, and log pi; what does not learn is NaN."""

    def packed(values: Tensor) -> Tensor:
        return torch.cat([values, torch.full((len(values), 1), math.nan)], dim=1).flatten()

    loss_mask = ~packed(log_mu).isnan()
    num_tokens, length = loss_mask.numel(), log_mu.shape[1] + 1
    whole = torch.zeros(num_tokens, dtype=torch.long)
    microbatch = Microbatch(
        tokens=whole,
        position_ids=whole,
        targets=whole,
        cu_seqlens=torch.arange(0, num_tokens + 1, length, dtype=torch.int32),
        loss_mask=loss_mask,
        rollout_log_probs=packed(log_mu),
        advantages=packed(advantages[:, None].expand_as(log_mu)),
        token_weights=torch.ones(num_tokens),
    )
    return packed(log_pi), microbatch


@pytest.mark.parametrize("sizes", [[8], [1, 0, 7], [3, 5]])
def test_a_batch_that_is_the_expectation_gives_the_theorem_s_terms(sizes: list[int]) -> None:
    """Two tokens, mu uniform: every response once is E_mu, and Binary-TV is the whole total variation."""
    generator = torch.Generator().manual_seed(3)
    pi = [torch.randn(2**t, 2, generator=generator, dtype=torch.float64).softmax(-1) for t in range(HORIZON)]
    mu = [torch.full_like(level, 0.5) for level in pi]
    rewards = torch.randn(2**HORIZON, generator=generator, dtype=torch.float64)
    exact = performance_bound(pi, mu, rewards)
    log_pi = torch.zeros(2**HORIZON, HORIZON, dtype=torch.float64)
    for row, response in enumerate(itertools.product(range(2), repeat=HORIZON)):
        prefix = 0
        for t, token in enumerate(response):
            log_pi[row, t] = pi[t][prefix, token].log()
            prefix = 2 * prefix + token
    log_mu = torch.full_like(log_pi, math.log(0.5))
    states = []
    for of_rank in zip(log_pi.split(sizes), log_mu.split(sizes), rewards.split(sizes), strict=True):
        rank = Metrics()
        values, m = _microbatch(*of_rank)
        add_bound_of_tokens(rank, values, m.rollout_log_probs, m.advantages, m.loss_mask)
        if len(of_rank[0]):
            add_bound_of_responses(rank, [m])
        states.append(rank.state())
    merged = Metrics().merge(states).values()
    assert merged["theory/surrogate"] == pytest.approx(exact.surrogate, rel=1e-12)
    assert merged["theory/sum_tv"] == pytest.approx(exact.expected_sum_tv, rel=1e-12)
    terms = bound_terms(merged)
    assert terms["theory/linear_term"] == pytest.approx(exact.linear_term, rel=1e-12)
    assert terms["theory/quadratic_term"] == pytest.approx(exact.quadratic_term, rel=1e-12)


def test_no_learning_token_gives_no_term() -> None:
    assert bound_terms(Metrics().values()) == {}


def test_noise_is_what_is_masked_before_any_update() -> None:
    kept = torch.tensor([False, True, False, False, True, True])
    advantages = torch.tensor([1.0, -1.0, -1.0, 0.0, 2.0, 1.0])
    learns = torch.tensor([True, True, True, True, True, False])
    versions = torch.tensor([4, 4, 3, 4, -1, 4])  # the third is older: its update is due to more than noise
    for version, expected in ((None, 0.5), (4, 1 / 3)):
        metrics = Metrics()
        add_noise(metrics, kept, advantages, learns, versions, version)
        assert metrics.values() == {"trust_region/noise_masked_fraction": expected}
    empty = Metrics()
    add_noise(empty, kept, torch.zeros(6), learns)
    assert empty.values() == {}


def test_the_warning_says_how_far_the_engines_are_apart() -> None:
    name = "trust_region/noise_masked_fraction"
    within = {name: NOISE_LIMIT, "mismatch/abs_prob_diff_mean": 0.01}
    assert noise_warning([within] * 9) is None and noise_warning([{}]) is None
    assert noise_warning([{name: math.nan}] * 5) is None
    far = within | {name: 0.074, "mismatch/tv_p999": 0.2}
    warning = noise_warning([far])
    assert warning is not None and "found 7.4% of tokens masked before any update, mean of 1 roll" in warning
    assert "(|pi - mu|: mean 0.01, 99.9th percentile 0.2)" in warning
    of_older = {name: 0.074, "mismatch/tv_p999": 0.9, "mismatch_age_0/tv_p999": 0.2}
    assert "(|pi - mu|: 99.9th percentile 0.2)" in (noise_warning([within, of_older]) or "")


def test_chance_is_no_noise() -> None:
    """The quickstart's run: a percentage point above the limit once, and hundredths around it."""
    usual, once = ({"trust_region/noise_masked_fraction": value} for value in (0.002, 0.015))
    assert noise_warning([usual, usual, once]) is None and noise_warning([once]) is None
    assert "mean of 4 rollouts" in (noise_warning([once] * 4) or "")
    assert noise_warning([*[once] * 5, *[usual] * 3]) is None, "what was is over"
