"""The accumulator: nothing may depend on which rank or micro-batch held a token."""

import dataclasses
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import TopKLogProbs
from megatron_dppo.data.batches.gradient_steps import with_advantages
from megatron_dppo.engines.base import EngineCounts
from megatron_dppo.kernels import FusedPolicyLoss
from megatron_dppo.metrics.means import add_group_means, add_token_means
from megatron_dppo.metrics.metrics import BINS_PER_DECADE, Metrics
from megatron_dppo.metrics.step_metrics import (
    OLDEST_AGE,
    add_ages,
    add_bound_of_tokens,
    add_clipped,
    add_mismatch,
    add_mismatch_by_age,
    add_prob_diff_extremes,
    add_topk_tv,
    add_trust_region,
    prob_diff_so_far,
    without_lone_age,
)
from megatron_dppo.rollout.counts import DROP_REASONS, DropReason, RolloutCounts
from megatron_dppo.types import Microbatch, Sample, WeightVersionSpan
from tests.support.samples import make_group, make_sample

BIN_WIDTH = 10 ** (1 / BINS_PER_DECADE) - 1
NUM_TOKENS = 5000


def _tokens(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log pi, log mu and a mask, as float32, with a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(NUM_TOKENS, generator=generator).mul(6)
    noise = torch.randn(NUM_TOKENS, generator=generator) * 0.02
    noise[::700] *= 100
    mask = torch.rand(NUM_TOKENS, generator=generator) < 0.8
    return (rollout + noise).clamp(max=0), rollout, mask


@pytest.mark.parametrize("sizes", [[NUM_TOKENS], [1, 4999], [100] * 50, [0, 2000, 0, 3000]])
def test_the_split_does_not_matter(sizes: list[int]) -> None:
    """Micro-batches, then ranks, of any size give what one tensor gives."""
    tensors = _tokens()
    whole = Metrics()
    add_mismatch(whole, *tensors)

    states = []
    for log_probs, rollout, mask in zip(*(x.split(sizes) for x in tensors), strict=True):
        rank = Metrics()
        half = log_probs.numel() // 2
        add_mismatch(rank, log_probs[:half], rollout[:half], mask[:half])
        add_mismatch(rank, log_probs[half:], rollout[half:], mask[half:])
        states.append(pickle.loads(pickle.dumps(rank.state())))
    merged = Metrics().merge(states).values()

    assert merged == pytest.approx(whole.values(), rel=1e-12)
    exact = [
        name for name in merged if name.startswith(("mismatch/ratio_", "mismatch/tv_", "mismatch/num_tokens"))
    ]
    assert len(exact) == 4 + 4 + 1
    assert {name: merged[name] for name in exact} == {name: whole.values()[name] for name in exact}
    assert Metrics().merge(reversed(states)).values() == pytest.approx(merged, rel=1e-12)


@pytest.mark.parametrize("q", [0.0, 0.01, 0.5, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_quantiles_are_right_to_one_bin(q: float, seed: int) -> None:
    """Against torch.quantile, over seven decades."""
    values = 10 ** (-7 * torch.rand(20000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    metrics = Metrics()
    metrics.add_histogram("x", values)
    assert metrics.quantile("x", q) == pytest.approx(float(torch.quantile(values, q)), rel=BIN_WIDTH)
    if q == 1.0:
        assert metrics.values()["x_max"] == float(values.max())


@pytest.mark.parametrize("q", [0.0, 0.001, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_quantiles_of_both_signs_are_right_to_one_bin(q: float, seed: int) -> None:
    """Values below 0, at 0, and far beyond 1; ratios are reported as exponentials of log-ratios."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20000, generator=generator, dtype=torch.float64).pow(3)
    values[values.abs() < 1e-4] = 0
    metrics = Metrics()
    metrics.add_histogram("x", values)
    assert values.min() < -30 and values.max() > 30
    assert metrics.quantile("x", q) == pytest.approx(float(torch.quantile(values, q)), rel=BIN_WIDTH)
    logs = values / values.abs().max() * 3
    metrics.add_log_ratios("ratio", logs)
    reported = metrics.values()
    assert reported["ratio_min"] == math.exp(logs.min()) and reported["ratio_max"] == math.exp(logs.max())
    for suffix, quantile in (("p001", 0.001), ("p999", 0.999)):
        exact = float(torch.quantile(logs, quantile))
        assert math.log(reported[f"ratio_{suffix}"]) == pytest.approx(exact, rel=BIN_WIDTH)


@pytest.mark.parametrize("num_values", [1, 2, 3, 100])
def test_few_values(num_values: int) -> None:
    """Between the two largest values a quantile is interpolated, as torch.quantile does."""
    values = torch.linspace(0.1, 0.9, num_values, dtype=torch.float64)
    metrics = Metrics()
    metrics.add_histogram("x", values)
    assert metrics.values()["x_p999"] == pytest.approx(float(torch.quantile(values, 0.999)), rel=BIN_WIDTH)


def test_zeros_tiny_values_and_ones() -> None:
    """The outer bins: zero is exact, below 1e-8 reads at most 1e-8, 1 reads 1."""
    metrics = Metrics()
    metrics.add_histogram("x", torch.tensor([0.0] * 10 + [1e-12] * 10 + [1.0] * 10))
    assert metrics.quantile("x", 0.1) == 0.0
    assert 0 < metrics.quantile("x", 0.5) <= 1e-8
    assert metrics.quantile("x", 0.9) == 1.0
    zeros = Metrics()
    zeros.add_histogram("x", torch.zeros(7))
    assert zeros.values() == {"x_max": 0.0, "x_p50": 0.0, "x_p99": 0.0, "x_p999": 0.0}


def test_nothing_is_left_out_and_nan_is_kept() -> None:
    """A mean over no token is no number; a NaN token must not hide behind good ones."""
    metrics = Metrics()
    metrics.add_mean("empty", 0.0, 0)
    metrics.add_histogram("no_values", torch.empty(0))
    assert metrics.values() == {}
    for order in ([1.0, math.nan, 2.0], [math.nan, 1.0]):
        broken = Metrics()
        for value in order:
            broken.add_max("max", value)
            broken.add_min("min", value)
            broken.add_histogram("h", torch.tensor([value]))
            broken.add_log_ratios("ratio", torch.tensor([value]))
        assert all(math.isnan(value) for value in broken.values().values())


def test_mismatch_formulas() -> None:
    """Each statistic against its definition in Python floats."""
    log_probs, rollout, mask = _tokens(3)
    metrics = Metrics()
    add_mismatch(metrics, log_probs, rollout, mask, prefix="mismatch_live")
    pairs = [(float(p), float(m)) for p, m, keep in zip(log_probs, rollout, mask, strict=True) if keep]
    ratios = [math.exp(p - m) for p, m in pairs]
    tv = [abs(math.exp(p) - math.exp(m)) for p, m in pairs]
    n = len(pairs)
    quantiles = (
        ("tv", tv, {"p50": 0.5, "p99": 0.99, "p999": 0.999}),
        ("ratio", ratios, {"p001": 0.001, "p999": 0.999}),
    )
    found = metrics.values()
    for name, values, reported in quantiles:
        for suffix, q in reported.items():
            expected = float(torch.quantile(torch.tensor(values, dtype=torch.float64), q))
            assert found.pop(f"mismatch_live/{name}_{suffix}") == pytest.approx(expected, rel=2 * BIN_WIDTH)
    assert found == pytest.approx(
        {
            "mismatch_live/num_tokens": n,
            "mismatch_live/abs_prob_diff_mean": math.fsum(tv) / n,
            "mismatch_live/kl_k1": math.fsum(m - p for p, m in pairs) / n,
            "mismatch_live/kl_k3": math.fsum(r - 1 - math.log(r) for r in ratios) / n,
            "mismatch_live/ratio_max": max(ratios),
            "mismatch_live/ratio_min": min(ratios),
            "mismatch_live/tv_max": max(tv),
        },
        rel=1e-9,
    )


def test_mismatch_by_age_equals_the_mismatch_of_each_age_alone() -> None:
    """Each age as if it were alone, in any micro-batches; tokens of unknown age are in none."""
    log_probs, rollout, mask = _tokens(4)
    versions = 100 - torch.arange(NUM_TOKENS, dtype=torch.int32) % 12
    versions[::7] = -1
    whole, parts, expected = Metrics(), Metrics(), Metrics()
    add_mismatch_by_age(whole, log_probs, rollout, mask, versions, 100)
    for piece in torch.arange(NUM_TOKENS).split(1234):
        of_piece = log_probs[piece], rollout[piece], mask[piece], versions[piece]
        add_mismatch_by_age(parts, *of_piece, 100)
    for age in range(OLDEST_AGE):
        add_mismatch(expected, log_probs, rollout, mask & (versions == 100 - age), prefix=f"mismatch_age_{age}")
    old = mask & (versions >= 0) & (versions <= 100 - OLDEST_AGE)
    add_mismatch(expected, log_probs, rollout, old, prefix=f"mismatch_age_{OLDEST_AGE}")
    assert whole.values() == expected.values()
    assert parts.values() == pytest.approx(whole.values(), rel=1e-12)
    assert {name.partition("/")[0] for name in whole.values()} == {f"mismatch_age_{age}" for age in range(9)}
    assert without_lone_age(whole.values()) == whole.values()


@pytest.mark.parametrize(("age", "num_kept"), [(0, 1), (3, 2)])
def test_single_age_is_dropped_if_it_equals_the_mismatch(age: int, num_kept: int) -> None:
    values = {"mismatch/kl_k3": 0.1, f"mismatch_age_{age}/kl_k3": 0.1}
    assert len(without_lone_age(values)) == num_kept


def test_topk_tv_is_half_the_sum_over_the_outcomes() -> None:
    """Two tokens of a vocabulary of four, K = 2: one sampled among them, one not; a third does not learn."""
    mu = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], [1, 0, 0, 0]], dtype=torch.float64)
    pi = torch.tensor([[0.4, 0.5, 0.1, 0.0], [0.2, 0.3, 0.4, 0.1], [0, 0, 0, 1]], dtype=torch.float64)
    ids, targets = torch.tensor([[0, 1]] * 3), torch.tensor([0, 2, 0])
    topk = TopKLogProbs(ids, mu.gather(1, ids).log(), pi.gather(1, ids).log())
    log_pi, log_mu = (p.gather(1, targets[:, None])[:, 0].log() for p in (pi, mu))
    metrics = Metrics()
    add_topk_tv(metrics, topk, targets, log_pi, log_mu, torch.tensor([True, True, False]), prefix="drift")
    found = metrics.values()
    assert found["drift/topk_tv_mean"] == pytest.approx(((0.1 + 0.2 + 0.1) / 2 + (0.3 + 0.3) / 2) / 2)
    assert found["drift/topk_tv_max"] == pytest.approx(0.3)


def test_k3_is_precise_near_zero() -> None:
    """R - 1 - log r cancels: at log r = 1e-6 it is 5e-13, which float32 could not see."""
    log_probs = torch.full((4,), -1.0 + 1e-6, dtype=torch.float64)
    metrics = Metrics()
    add_mismatch(
        metrics, log_probs, torch.full((4,), -1.0, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    )
    assert metrics.values()["mismatch/kl_k3"] == pytest.approx(5e-13, rel=1e-4)


def test_equal_policies_give_exact_zeros() -> None:
    """What a float32 engine must report."""
    log_probs, _, mask = _tokens()
    metrics = Metrics()
    add_mismatch(metrics, log_probs, log_probs, mask)
    values = metrics.values()
    assert [values[f"mismatch/{name}"] for name in ("abs_prob_diff_mean", "kl_k1", "kl_k3", "tv_p999")] == [
        0
    ] * 4
    assert {value for name, value in values.items() if name.startswith("mismatch/ratio_")} == {1}


def test_hopeless_tokens_stay_finite() -> None:
    """A ratio beyond any float is reported at the limit; the masked-out NaN is ignored."""
    log_probs = torch.tensor([-1000.0, 0.0, math.nan])
    rollout = torch.tensor([0.0, -1000.0, 0.0])
    metrics = Metrics()
    add_mismatch(metrics, log_probs, rollout, torch.tensor([True, True, False]))
    values = metrics.values()
    assert all(map(math.isfinite, values.values()))
    assert values["mismatch/ratio_max"] == pytest.approx(math.exp(80))
    assert torch.tensor(values["mismatch/ratio_max"], dtype=torch.float32).isfinite()
    assert values["mismatch/abs_prob_diff_mean"] == 1.0
    bad = Metrics()
    add_mismatch(bad, log_probs, rollout, torch.tensor([True, True, True]))
    assert math.isnan(bad.values()["mismatch/kl_k3"])


def entropies(values: list[float], mask: list[bool]) -> tuple[FusedPolicyLoss, Microbatch]:
    """The results of a loss whose tokens have these entropies, and its micro-batch."""
    zeros, none = torch.zeros(len(values)), torch.zeros(len(values), dtype=torch.int64)
    starts, learns = torch.tensor([0, len(values)], dtype=torch.int32), torch.tensor(mask)
    rows = dict.fromkeys(("weight", "divergence", "ratio", "coefficient", "log_probs"), zeros)
    out = FusedPolicyLoss(
        loss_sum=zeros.sum(), mask=learns, entropy=torch.tensor(values), topk_log_probs=None, **rows
    )
    return out, Microbatch(
        tokens=none,
        position_ids=none,
        targets=none,
        cu_seqlens=starts,
        loss_mask=learns,
        rollout_log_probs=zeros,
        advantages=zeros,
        token_weights=zeros,
    )


def test_no_learning_token_on_this_rank() -> None:
    """Such a rank adds a count of zero, nothing else."""
    metrics = Metrics()
    add_mismatch(metrics, torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    add_token_means(metrics, *entropies([0.0, 0.0, 0.0], [False, False, False]))
    assert metrics.values() == {"mismatch/num_tokens": 0}


def test_entropy_is_a_token_mean() -> None:
    """Masked positions do not count, NaN there included."""
    metrics = Metrics()
    add_token_means(metrics, *entropies([1.0, math.nan, 2.0], [True, False, True]))
    add_token_means(metrics, *entropies([6.0], [True]))
    assert metrics.values()["policy/entropy"] == 3.0


def test_trust_region_denominators() -> None:
    """By sign for what is masked; over all learning tokens for the rest."""
    counts = {
        "num_loss_tokens": torch.tensor(100),
        "num_positive": 40,
        "num_negative": 50,
        "num_masked_positive": 4,
        "num_masked_negative": 10,
        "num_ratio_capped": 5,
        "num_bad_updates": 2,
        "num_bad_updates_kept": 1,
        "sum_divergence": torch.tensor(3.0),
    }
    metrics = Metrics()
    add_trust_region(metrics, counts)
    assert metrics.values() == {
        "policy/clamped_log_probs_fraction": 0,
        "trust_region/infinite_divergence_fraction": 0,
        "trust_region/bad_update_fraction": 0.02,
        "trust_region/bad_update_fraction_of_kept": 1 / 86,
        "trust_region/bad_update_fraction_of_negative": 0.04,
        "trust_region/divergence_mean": 0.03,
        "trust_region/masked_fraction_negative": 0.2,
        "trust_region/masked_fraction_positive": 0.1,
        "trust_region/ratio_capped_fraction": 0.05,
    }
    no_positive = Metrics()
    add_trust_region(no_positive, {**counts, "num_positive": 0, "num_masked_positive": 0})
    assert "trust_region/masked_fraction_positive" not in no_positive.values()
    one_infinite = Metrics()
    add_trust_region(one_infinite, {**counts, "num_infinite_divergence": 1, "sum_divergence": 9.9})
    assert one_infinite.values()["trust_region/divergence_mean"] == pytest.approx(0.1)
    assert one_infinite.values()["trust_region/infinite_divergence_fraction"] == 0.01


def test_each_count_has_its_own_name() -> None:
    """All counts differ, so that none can stand under the name of another."""
    engine = EngineCounts(*range(101, 101 + len(dataclasses.fields(EngineCounts))))
    dropped: dict[DropReason, int] = {reason: 7 + number for number, reason in enumerate(DROP_REASONS)}
    names = [field.name for field in dataclasses.fields(RolloutCounts) if field.type is int]
    plain: dict[str, Any] = {name: 1000 + 10 * number for number, name in enumerate(names)}
    counts = RolloutCounts(**plain, num_dropped=dropped, engine=engine)
    values = counts.metrics()
    num_samples = counts.num_samples
    expected = {
        "rollout/response_length_mean": counts.num_response_tokens / num_samples,
        "rollout/num_turns_mean": counts.num_turns / num_samples,
        "rollout/truncated_fraction": counts.num_truncated / num_samples,
        "rollout/prompts_too_long": counts.num_prompts_too_long,
        "rollout/dropped_samples": sum(dropped.values()),
        "rollout/dropped_groups": counts.num_dropped_groups,
        "rollout/replaced_groups": counts.num_replaced_groups,
        "rollout/discarded_partials": counts.num_discarded_partials,
        "rollout/continued_samples": counts.num_continued,
        "rollout/old_token_fraction": counts.num_old_tokens / counts.num_response_tokens,
        "rollout/requeued_requests": counts.num_requeued,
        "rollout/retractions": counts.num_retractions,
        "rollout/recomputed_routes": counts.num_recomputed_routes,
        "agents/calls": counts.num_agent_calls,
        "agents/forks": counts.num_agent_forks,
        "agents/branches": counts.num_agent_branches,
        "agents/untrained_tokens": counts.num_untrained_tokens,
        "engine/retries": engine.num_retries,
        "engine/maybe_sampled_twice": engine.num_maybe_sampled_twice,
        "engine/timed_out": engine.num_timed_out,
        "engine/unanswered": engine.num_unanswered,
        "engine/refused_answers": engine.num_refused_answers,
        "engine/requeued": engine.num_requeued,
        "engine/retractions": engine.num_retractions,
        "engine/without_routes": engine.num_without_routes,
        "engine/prompt_tokens": engine.num_prompt_tokens,
        "engine/cached_tokens": engine.num_cached_tokens,
    }
    assert values == expected | {f"rollout/dropped_{reason}": n for reason, n in dropped.items()}


def test_extremes_of_a_rollout_have_signs_and_are_of_all_its_steps() -> None:
    """Each extreme comes from another step and another rank; a token that does not learn is in none."""
    log_mu = torch.tensor([0.5, 0.5, 0.5, 0.5]).log()
    learns = torch.tensor([True, True, True, False])

    def step(*pi_of_ranks: tuple[float, ...]) -> dict[str, float]:
        ranks = [Metrics() for _ in pi_of_ranks]
        for rank, pi in zip(ranks, pi_of_ranks, strict=True):
            add_prob_diff_extremes(rank, torch.tensor(pi).log(), log_mu, learns)
        add_prob_diff_extremes(ranks[0], log_mu, log_mu, torch.zeros(4, dtype=torch.bool))  # no token learns
        return Metrics().merge(ranks).values()

    first, second = step((0.6, 0.55, 0.7, 1.0), (0.75, 0.8, 0.5, 1.0)), step((0.4, 0.1, 0.3, 1e-9))
    assert first == pytest.approx({"drift/prob_diff_max": 0.3, "drift/prob_diff_min": 0.0}, abs=1e-6)
    assert second == pytest.approx({"drift/prob_diff_max": -0.1, "drift/prob_diff_min": -0.4}, abs=1e-6)
    expected = {"mismatch/prob_diff_max": 0.3, "mismatch/prob_diff_min": -0.4}
    for steps in ([first, second], [second, first], [first, {"loss/policy": 1.0}, second, second]):
        row = {"mismatch/tv_max": 0.9}
        for each in steps:
            row |= prob_diff_so_far(row, each)
        assert row == pytest.approx(row | expected, abs=1e-6), steps
    assert prob_diff_so_far({}, {"loss/policy": 1.0}) == {}, "a step in which no token learnt has no extremes"
    broken = prob_diff_so_far(expected, {"drift/prob_diff_max": math.nan, "drift/prob_diff_min": math.nan})
    assert all(map(math.isnan, broken.values())), "a NaN is reported"


def test_means_of_clipped_tokens_are_over_every_token_by_sign() -> None:
    """Micro-batches weigh as much as their tokens, and a sign without a masked token has no mean."""
    mu = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    pi = torch.tensor([0.3, 0.6, 0.1, 0.2, 0.9, 0.9, 0.9])
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan, math.nan, math.nan])
    advantages = torch.tensor([1.0, 0.5, -1.0, 2.0, -1.0, 0.0, -3.0])
    masked = torch.tensor([True, True, True, True, False, True, True])
    learns = torch.tensor([True, True, True, True, True, True, False])  # four are masked: + + - +
    metrics = Metrics()
    for rows in (slice(0, 1), slice(1, 7)):
        values = dict(log_probs=pi[rows].log(), rollout_log_probs=mu[rows].log(), entropy=entropy[rows])
        add_clipped(metrics, ~masked[rows], **values, advantages=advantages[rows], loss_mask=learns[rows])
    assert metrics.values() == pytest.approx(
        {
            "clipped/num_tokens_positive": 3,
            "clipped/num_tokens_negative": 1,
            "clipped/mu_mean_positive": 0.7 / 3,
            "clipped/mu_mean_negative": 0.3,
            "clipped/pi_mean_positive": 1.1 / 3,
            "clipped/pi_mean_negative": 0.1,
            "clipped/entropy_mean_positive": 7 / 3,
            "clipped/entropy_mean_negative": 3,
        }
    )
    values = dict(log_probs=pi.log(), rollout_log_probs=mu.log(), entropy=entropy)
    nothing = Metrics()
    add_clipped(nothing, torch.ones(7, dtype=torch.bool), **values, advantages=advantages, loss_mask=learns)
    assert nothing.values() == {"clipped/num_tokens_positive": 0, "clipped/num_tokens_negative": 0}


def test_extremes_of_the_bound_are_of_the_learning_tokens() -> None:
    metrics = Metrics()
    pi, mu = torch.tensor([0.3, 0.5, 0.9]), torch.tensor([0.4, 0.1, 0.1])
    mask = torch.tensor([True, True, False])
    add_bound_of_tokens(metrics, pi.log(), mu.log(), torch.tensor([-2.5, 1.0, 9.0]), mask)
    values = metrics.values()
    assert values["theory/max_tv"] == pytest.approx(0.4)
    assert values["theory/max_advantage"] == pytest.approx(2.5)


def test_shares_of_samples_by_the_age_of_their_oldest_token() -> None:
    """`staleness/0` to `staleness/2`, of samples whose spans differ."""

    def sample(*versions: int) -> Sample:
        spans = tuple(WeightVersionSpan(i, i + 1, version) for i, version in enumerate(versions))
        return replace(make_sample(list(range(2 + len(versions))), 2), weight_versions=spans)

    metrics = Metrics()
    add_ages(metrics, [sample(5), sample(4, 5), sample(3, 5), sample(3, 4)], weight_version=5, max_staleness=2)
    values = metrics.values()
    assert [values[f"staleness/{age}"] for age in range(3)] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize(
    ("rewards", "share"),
    [([0.3, 0.1 + 0.2, 0.3], 1.0), ([-7.0] * 3, 1.0), ([0.0, 0.1, 0.1], 0.0), ([1e-9, 2e-9], 0.0)],
)
def test_zero_variance_is_that_of_the_advantages(rewards: list[float], share: float) -> None:
    group = make_group(0, [make_sample([1, 2, n], 1, reward=reward) for n, reward in enumerate(rewards)])
    metrics = Metrics()
    add_group_means(metrics, group)
    assert metrics.values()["reward/zero_variance_fraction"] == share
    (learning,) = with_advantages([group], normalize_std=True)
    assert any(sample.advantage for sample in learning.samples) == (share == 0)
