"""Rewards for the fault campaign, named in a config as "tests.faults.rewards:digits"."""

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def digits(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """The share of tokens that are digits: a random model can earn it, so that advantages are not all zero."""
    words = response.split()
    return RewardResult(sum(word.isdigit() for word in words) / max(len(words), 1))
