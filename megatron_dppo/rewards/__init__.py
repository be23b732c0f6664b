"""Rewards by name. Importing this package registers all of them."""

from megatron_dppo.rewards.arithmetic import arithmetic_reward
from megatron_dppo.rewards.base import (
    REWARDS,
    Reward,
    RewardFault,
    RewardFaultKind,
    RewardRequest,
    RewardResult,
    answer_form,
    checked,
    problem_with,
    register,
    reward,
)
from megatron_dppo.rewards.choice import RewardChoice, problems_with
from megatron_dppo.rewards.dapo import dapo_reward
from megatron_dppo.rewards.math.reward import is_matched_as_text, math_reward
from megatron_dppo.rewards.pool import RewardPool

__all__ = [
    "REWARDS",
    "Reward",
    "RewardChoice",
    "RewardFault",
    "RewardFaultKind",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "answer_form",
    "arithmetic_reward",
    "checked",
    "dapo_reward",
    "is_matched_as_text",
    "math_reward",
    "problem_with",
    "problems_with",
    "register",
    "reward",
]
