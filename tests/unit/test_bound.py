"""The bound's terms on batches, and whether a threshold stands above the engines' noise."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron_dppo.metrics.alarms import NOISE_LIMIT, noise_warning
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import (
    add_bound_of_responses,
    add_bound_of_tokens,
    add_noise,
    bound_terms,
)
from megatron_dppo.types import Microbatch
from tests.support.exact_bounds import performance_bound

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


def _all_responses(pi: list[Tensor], mu: list[Tensor], rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log pi and log mu [N, T] and rewards [N]: each response as often as mu, in 16ths, samples it."""
    log_pi, log_mu, scores = list[list[float]](), list[list[float]](), list[float]()
    vocab_size = mu[0].shape[1]
    for number, response in enumerate(itertools.product(range(vocab_size), repeat=len(mu))):
        prefix, of_pi, of_mu = 0, list[float](), list[float]()
        for level, token in enumerate(response):
            of_pi.append(float(pi[level][prefix, token].log()))
            of_mu.append(float(mu[level][prefix, token].log()))
            prefix = vocab_size * prefix + token
        count = round(16 ** len(mu) * math.exp(sum(of_mu)))
        log_pi += [of_pi] * count
        log_mu += [of_mu] * count
        scores += [float(rewards[number])] * count
    pi_of_all, mu_of_all, of_scores = (torch.tensor(x, dtype=torch.float64) for x in (log_pi, log_mu, scores))
    return pi_of_all, mu_of_all, of_scores


def _in_ranks(sizes: list[int], log_pi: Tensor, log_mu: Tensor, rewards: Tensor) -> dict[str, float]:
    """Return the metrics of a batch whose responses are split over ranks."""
    states = []
    for of_rank in zip(log_pi.split(sizes), log_mu.split(sizes), rewards.split(sizes), strict=True):
        rank = Metrics()
        values, m = _microbatch(*of_rank)
        add_bound_of_tokens(rank, values, m.rollout_log_probs, m.advantages, m.loss_mask)
        if len(of_rank[0]):
            add_bound_of_responses(rank, [m])
        states.append(rank.state())
    merged = Metrics().merge(states).values()
    return merged | bound_terms(merged)


@pytest.mark.parametrize("shares", [[0, 1, 7], [3, 5], [8]])
@pytest.mark.parametrize(
    "of_mu",
    [
        pytest.param([[8, 8], [8, 8], [8, 8]], id="two tokens, mu uniform"),
        pytest.param([[2, 4, 10], [13, 2, 1]], id="three tokens"),
        pytest.param([[1, 1, 6, 8], [16, 0, 0, 0]], id="four tokens, then one that is sure"),
    ],
)
def test_a_batch_that_is_the_expectation_gives_the_theorem_s_terms(
    of_mu: list[list[int]], shares: list[int]
) -> None:
    """Each response comes as often as mu samples it: Eq. 10 gives the total variation, Binary-TV less."""
    generator = torch.Generator().manual_seed(3)
    mu = [
        torch.tensor([row], dtype=torch.float64).expand(len(row) ** depth, -1) / 16
        for depth, row in enumerate(of_mu)
    ]
    noise = [torch.randn(level.shape, generator=generator, dtype=torch.float64) for level in mu]
    pi = [(level.log() + values).softmax(-1) for level, values in zip(mu, noise, strict=True)]
    rewards = torch.randn(mu[0].shape[1] ** len(mu), generator=generator, dtype=torch.float64)
    exact = performance_bound(pi, mu, rewards)
    whole = _all_responses(pi, mu, rewards)
    sizes = [len(whole[0]) // 8 * share for share in shares]
    found = _in_ranks(sizes, *whole)
    assert found["theory/surrogate"] == pytest.approx(exact.surrogate, rel=1e-11)
    assert found["theory/sum_tv_ratio"] == pytest.approx(exact.expected_sum_tv, rel=1e-11)
    assert found["theory/linear_term"] == pytest.approx(
        exact.linear_term * found["theory/max_advantage"] / exact.max_reward, rel=1e-11
    )
    if len(of_mu[0]) == 2:  # Binary-TV is the whole total variation
        assert found["theory/sum_tv"] == pytest.approx(exact.expected_sum_tv, rel=1e-11)
        assert found["theory/quadratic_term"] == pytest.approx(exact.quadratic_term, rel=1e-11)
        assert found["theory/composite_term"] == pytest.approx(exact.composite_term, rel=1e-11)
    else:
        assert found["theory/sum_tv"] < 0.95 * exact.expected_sum_tv
        assert found["theory/max_tv"] <= exact.max_tv + 1e-15
        assert found["theory/quadratic_term"] <= exact.quadratic_term + 1e-15
    terms = found["theory/linear_term"], found["theory/quadratic_term"]
    assert found["theory/composite_term"] == min(terms)


def test_both_terms_can_be_the_smaller_one() -> None:
    few = {
        "theory/longest_response": 2,
        "theory/max_advantage": 1,
        "theory/max_tv": 0.1,
        "theory/sum_tv_ratio": 0.1,
    }
    assert bound_terms(few)["theory/composite_term"] == pytest.approx(2 * 2 * 0.1**2)
    assert bound_terms(few | {"theory/longest_response": 90})["theory/composite_term"] == pytest.approx(0.4)


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
    assert noise_warning([{name: 0.008}] * 9) is None and noise_warning([{name: 0.013}] * 9) is not None
    assert noise_warning([{name: 0.04}]) is None and noise_warning([{name: 0.06}]) is not None
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
