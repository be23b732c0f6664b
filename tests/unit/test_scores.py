"""Evaluation scores against brute force, on any number of ranks."""

import itertools
import math

import numpy as np
import pytest

from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.scores import (
    PromptScore,
    interval,
    is_correct,
    metric_names,
    not_asked,
    over_ranks,
    pass_at,
    powers_of_two,
    refuse_if_too_many_dropped,
    set_metrics,
)


def scored(index: int, num_correct: int, n: int = 4, num_dropped: int = 0) -> PromptScore:
    """A prompt whose right responses earn 1, and whose wrong ones are cut after 10 tokens."""
    num_wrong = n - num_correct
    return PromptScore(
        index, n, n, num_dropped, num_correct, num_wrong, 5 * num_correct + 10 * num_wrong, num_correct
    )


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(n: int) -> None:
    for k, c in itertools.product(range(1, n + 1), range(n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
        assert pass_at(k, n, c) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_responses_is_finite_and_rises_with_k() -> None:
    values = [pass_at(k, 4096, 3) for k in powers_of_two(4096)]
    assert values[0] == pytest.approx(3 / 4096) and values[-1] == 1.0
    assert values == sorted(values)


def test_powers_of_two_end_at_the_number_of_responses() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 32)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8, 16, 32)]


def test_correct_is_what_either_pair_of_rewards_calls_right() -> None:
    assert all(map(is_correct, (1.0, 0.6))) and not any(map(is_correct, (0.0, -1.0, 0.4, 0.5)))


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    """Of 60 problems with pass rates drawn from a beta distribution; 95 % asked, 100 sets drawn."""
    generator = np.random.default_rng(0)
    num_covered = 0
    for seed in range(100):
        low, high = interval(list(generator.beta(1, 2, size=60)), seed)
        num_covered += low <= 1 / 3 <= high
    assert 0.9 <= num_covered / 100 <= 0.99


def test_an_interval_is_as_wide_as_that_of_the_normal_distribution() -> None:
    """Of 400 rewards; one of 90 % would be 16 % narrower, and one of 98 % 19 % wider."""
    rewards = [float(number % 5 > 1) for number in range(400)]
    low, high = interval(rewards, 0)
    assert low < 0.6 < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.6 * 0.4 / 400), rel=0.07)


def test_an_interval_is_repeated_by_its_seed_and_shrinks_to_a_point() -> None:
    values = [float(value) for value in np.linspace(0, 1, 30) ** 2]
    assert interval(values, 3) == interval(values, 3) != interval(values, 4)
    assert interval([0.5] * 7, 0) == (0.5, 0.5) == interval([0.5], 0)


def test_the_metrics_of_a_set() -> None:
    scores = [scored(0, 4), scored(1, 1, num_dropped=1), not_asked(2, 4)]
    metrics = set_metrics("toy", scores, (1, 2, 4), samples_per_prompt=4, seed=0)
    assert list(metrics) == metric_names("toy", 4, (1, 2, 4))
    assert metrics["eval/toy/avg_at_4"] == metrics["eval/toy/pass_at_1"] == pytest.approx(1.25 / 3)
    assert metrics["eval/toy/pass_at_2"] == pytest.approx(1.5 / 3)  # half of the second prompt's pairs
    assert metrics["eval/toy/pass_at_4"] == pytest.approx(2 / 3)
    assert metrics["eval/toy/avg_at_4_low"] == 0.0 and metrics["eval/toy/avg_at_4_high"] == 1.0
    assert metrics["eval/toy/truncated_fraction"] == 3 / 8
    assert metrics["eval/toy/response_length_mean"] == 55 / 8
    assert metrics["eval/toy/dropped"] == 5


def earned(index: int, rewards: list[float], num_dropped: int) -> PromptScore:
    """A prompt whose responses earned these rewards, and others that were dropped."""
    n, faults = len(rewards) + num_dropped, {"reward_timed_out": num_dropped}
    lowest = min(rewards, default=math.inf)
    example = f"reward_timed_out, sample {index}+0: slow" if num_dropped else None
    return PromptScore(index, n, n, num_dropped, 0, 0, 9, sum(rewards), lowest, faults, example)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "worst"),
    [
        ([earned(0, [-1.0, 1.0], 2), earned(1, [-0.5] * 4, 0)], -1.0),
        ([earned(0, [], 4), earned(1, [-3.0, -2.0], 2)], -3.0),  # none of the first prompt has a reward
        ([not_asked(0, 4), earned(1, [-0.25] * 4, 0)], -0.25),
        ([earned(0, [0.5], 3), earned(1, [2.0, 1.0], 2)], 0.0),
        ([not_asked(0, 4), not_asked(1, 4)], 0.0),
    ],
)
def test_a_dropped_response_never_beats_the_worst(scores: list[PromptScore], worst: float) -> None:
    metrics = set_metrics("toy", scores, (1,), samples_per_prompt=4, seed=0)
    total = sum(score.total_reward + worst * score.num_dropped for score in scores)
    assert metrics["eval/toy/avg_at_4"] == pytest.approx(total / 8)
    assert metrics["eval/toy/dropped"] == sum(score.num_dropped for score in scores)
    assert metrics["eval/toy/avg_at_4_low"] <= metrics["eval/toy/avg_at_4"] <= metrics["eval/toy/avg_at_4_high"]


def test_too_many_dropped_responses_are_refused_with_the_first_fault() -> None:
    scores = [not_asked(0, 4), earned(1, [-1.0] * 4, 0), earned(2, [1.0] * 3, 1)]
    refuse_if_too_many_dropped("toy", scores, 1 / 8, {})  # a prompt too long is none of them
    with pytest.raises(RolloutError, match=r"sets\.toy: found 1 of 8 .*1 reward_timed_out\)") as error:
        refuse_if_too_many_dropped("toy", scores, 0.12, {})
    assert "2+0: slow" in str(error.value) and "raise rollout.max_dropped_fraction" in str(error.value)
    with pytest.raises(RolloutError, match=r"found 1 prompts, .*data\.max_prompt"):
        refuse_if_too_many_dropped("toy", scores[:1], 1.0, {})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_any_number_of_ranks_gives_the_same_bits(num_ranks: int) -> None:
    generator = np.random.default_rng(1)
    totals = generator.normal(size=11)
    scores = [PromptScore(i, 3, 3, 0, 1, 0, 7, float(total)) for i, total in enumerate(totals)]
    gathered = [{"a": scores[rank::num_ranks], "b": []} for rank in range(num_ranks)]
    assert over_ranks(gathered) == {"a": scores, "b": []}


def test_a_set_without_a_single_response_has_finite_metrics() -> None:
    metrics = set_metrics("toy", [not_asked(0, 2)], (1, 2), samples_per_prompt=2, seed=0)
    assert all(map(math.isfinite, metrics.values()))
