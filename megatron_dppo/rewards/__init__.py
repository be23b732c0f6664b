"""Rewards by name. Importing this package registers all of them."""

from megatron_dppo.rewards.arithmetic import arithmetic_reward
from megatron_dppo.rewards.base import REWARDS, Reward, RewardResult, checked, register, reward
from megatron_dppo.rewards.pool import RewardFault, RewardPool, RewardRequest

__all__ = [
    "REWARDS",
    "Reward",
    "RewardFault",
    "RewardPool",
    "RewardRequest",
    "RewardResult",
    "arithmetic_reward",
    "checked",
    "register",
    "reward",
]
