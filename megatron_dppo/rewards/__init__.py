"""Rewards by name. Importing this package registers all of them."""

from megatron_dppo.rewards.arithmetic import arithmetic_reward
from megatron_dppo.rewards.base import REWARDS, Reward, RewardResult, register, reward

__all__ = ["REWARDS", "Reward", "RewardResult", "arithmetic_reward", "register", "reward"]
