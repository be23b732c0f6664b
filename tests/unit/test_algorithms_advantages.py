"""Group advantages and token weights beyond the exact vectors."""

import math

import pytest
import torch

from megatron_dppo.algorithms import AGGREGATIONS, group_advantages, have_equal_rewards, token_weights
from megatron_dppo.errors import ConfigError, RewardError


def test_groups_in_any_order_and_of_any_ids():
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0])
    expected = [0.0, -1.0, -1.0, 1.0, 1.0]
    ids = [-3, 900, -3, 900, -3]
    for group_ids in (
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        ids,
        [f"prompt-{i}" for i in ids],
    ):
        assert group_advantages(rewards, group_ids).tolist() == expected


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage(value: float, dtype: torch.dtype):
    rewards = torch.full((7,), value, dtype=dtype)
    for normalize_std in (False, True):
        assert group_advantages(rewards, [0] * 7, normalize_std).tolist() == [0] * 7


EQUAL_UP_TO_ROUNDING = [
    [0.1 + 0.2, 0.3, 0.3],
    [0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.3],
    [1e12 * (0.1 + 0.2), 1e12 * 0.3],
    [1e-9 * (0.1 + 0.2), 1e-9 * 0.3],
    [-0.7 - 0.1, -0.8, -(0.7 + 0.1)],
    [0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1],  # parts that cancel
    [0.6000000238418579, 0.6000000834465027],  # of a reward in float32: 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1
]


@pytest.mark.parametrize("rewards", EQUAL_UP_TO_ROUNDING, ids=str)
@pytest.mark.parametrize("normalize_std", [False, True])
def test_rewards_equal_up_to_summation_order_have_no_advantage(rewards: list[float], normalize_std: bool):
    assert len(set(rewards)) > 1 and have_equal_rewards(rewards)
    # The other group is far larger: each group has its own scale.
    both = torch.tensor([*rewards, 0.0, 1e15], dtype=torch.float64)
    advantages = group_advantages(both, [0] * len(rewards) + [1, 1], normalize_std)
    assert advantages[:-2].tolist() == [0] * len(rewards) and advantages[-2:].abs().min() > 0.5


UNIT = 2.0**-23  # in the last place of 1.0 in float32: four of them are rounding


@pytest.mark.parametrize(
    ("rewards", "is_rounding"),
    [
        ([1.0, 1 + 3 * UNIT], True),
        ([-1000.0, -1000 * (1 + 3 * UNIT)], True),
        ([1.0, 1 + 6 * UNIT], False),
        ([0.0, 7e-15], True),  # terms that cancel, in float64
        ([0.0, -1.4e-14], False),
    ],
    ids=str,
)
def test_differences_are_rounding_up_to_the_tolerances(rewards: list[float], is_rounding: bool):
    assert have_equal_rewards(rewards) is is_rounding
    advantages = group_advantages(torch.tensor([*rewards, 5.0, 6.0], dtype=torch.float64), [0, 0, 1, 1])
    half = 0.0 if is_rounding else (rewards[1] - rewards[0]) / 2
    assert advantages.tolist() == pytest.approx([-half, half, -0.5, 0.5], rel=1e-6)


@pytest.mark.parametrize(("num_units", "is_mean"), [(4, True), (8, False)])
def test_a_reward_is_the_mean_up_to_the_tolerance_of_the_spread(num_units: int, is_mean: bool):
    """The spread is 1.5, so that six units are rounding."""
    off = num_units * UNIT
    rewards = torch.tensor([0.0, 0.75 + off, 1.5, 0.75 - off], dtype=torch.float64)
    advantages = group_advantages(rewards, [0] * 4)
    assert advantages.sign().tolist() == [-1, 0 if is_mean else 1, 1, 0 if is_mean else -1]


def test_the_standard_deviation_has_a_millionth_added():
    rewards = torch.tensor([0.0, 2e-6], dtype=torch.float64)  # the unbiased deviation is sqrt(2) millionths
    expected = 1 / (math.sqrt(2) + 1)
    advantages = group_advantages(rewards, [0, 0], normalize_std=True)
    assert advantages.tolist() == pytest.approx([-expected, expected])


@pytest.mark.parametrize(
    "rewards", [[0.0, 1e-9], [1.0, 1.000001], [-1e6, -1e6 + 1], [1e-12, 2e-12], [3e17, 9e17]]
)
def test_small_differences_of_rewards_are_learnt_from(rewards: list[float]):
    assert not have_equal_rewards(rewards)
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), [0, 0])
    half = (rewards[1] - rewards[0]) / 2
    assert advantages.tolist() == pytest.approx([-half, half], rel=1e-6)


def test_rounding_does_not_choose_the_sign_of_a_reward_that_is_the_mean():
    rewards = [0.0, 0.1, 0.2, 0.3, 0.3 + 0.3, 0.1 + 0.2, 0.2 + 0.4]  # the mean is 0.3
    assert (torch.tensor(rewards, dtype=torch.float64) - 0.3).unique().numel() > 6
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), [0] * 7)
    assert advantages.sign().tolist() == [-1, -1, -1, 0, 1, 0, 1]


def test_a_group_of_one_has_no_advantage():
    for normalize_std in (False, True):
        advantages = group_advantages(torch.tensor([3.0, 1.0, 0.0]), [1, 2, 2], normalize_std)
        assert advantages[0] == 0
        assert advantages.isfinite().all()


def test_types_and_empty():
    assert group_advantages(torch.tensor([1, 0]), [0, 0]).dtype == torch.float32
    assert group_advantages(torch.tensor([True, False]), [0, 0]).tolist() == [0.5, -0.5]
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.bfloat16), [0, 0]).dtype == torch.float32
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_bad_rewards():
    with pytest.raises(ConfigError, match=r"\[3\] ids"):
        group_advantages(torch.zeros(2), [0, 0, 0])
    with pytest.raises(ConfigError):
        group_advantages(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long))
    for shape in ((), (2, 3)):
        with pytest.raises(ConfigError, match=r"expected \[N\] of both"):
            group_advantages(torch.ones(shape), torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(RewardError, match="reward 1: found nan"):
        group_advantages(torch.tensor([0.0, math.nan]), [0, 0])
    with pytest.raises(RewardError, match=r"reward 1: found -3e\+38; .* 1e\+18"):
        group_advantages(torch.tensor([1.0, -3e38], dtype=torch.float64), [0, 0])
    with pytest.raises(RewardError, match=r"reward 0: found 1\.5e\+18"):
        group_advantages(torch.tensor([1.5e18, 0.0], dtype=torch.float64), [0, 0])


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_of_sequences_with_nothing_to_learn(mode: str):
    with_empty = token_weights(mode, torch.tensor([0, 2, 0, 3], dtype=torch.int32), 4)
    assert torch.equal(with_empty, token_weights(mode, [2, 3], 4))
    assert with_empty.dtype == torch.float64
    assert token_weights(mode, [0, 0], 4).shape == token_weights(mode, [], 4).shape == (0,)


def test_weights_by_hand():
    assert token_weights("token_mean", [1, 3]).tolist() == [0.25] * 4
    assert token_weights("seq_mean_token_sum", [1, 3]).tolist() == [0.5] * 4
    assert token_weights("seq_mean_token_mean", [1, 3]).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert token_weights("seq_mean_token_sum_norm", [1, 3], 8).tolist() == [1 / 16] * 4


def test_bad_aggregation():
    with pytest.raises(ConfigError, match="'token_mean'\\?"):
        token_weights("tokenmean", [1])
    for response_length in (None, 0, -1):
        with pytest.raises(ConfigError, match="response_length"):
            token_weights("seq_mean_token_sum_norm", [1], response_length)
    with pytest.raises(ConfigError, match="lengths"):
        token_weights("token_mean", [1, -1])
    with pytest.raises(ConfigError, match="lengths"):
        token_weights("token_mean", torch.tensor([1.5]))
