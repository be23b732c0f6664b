"""Rewards by name. Importing this package registers all of them."""

from megatron_dppo.rewards.adapters import (
    group_reward,
    slime_batch_reward,
    slime_reward,
    verl_batch_reward,
    verl_reward,
)
from megatron_dppo.rewards.base import (
    REWARDS,
    Reward,
    RewardFault,
    RewardFaultKind,
    RewardRequest,
    RewardResult,
    answer_form,
    call_reward,
    problem_with,
    register,
    reward,
)
from megatron_dppo.rewards.choice import RewardChoice, problems_with
from megatron_dppo.rewards.math.reward import is_matched_as_text, math_reward
from megatron_dppo.rewards.pool import RewardPool
from megatron_dppo.rewards.text import arithmetic_reward, dapo_reward

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
    "call_reward",
    "dapo_reward",
    "group_reward",
    "is_matched_as_text",
    "math_reward",
    "problem_with",
    "problems_with",
    "register",
    "reward",
    "slime_batch_reward",
    "slime_reward",
    "verl_batch_reward",
    "verl_reward",
]
