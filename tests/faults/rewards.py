"""Rewards for the fault campaign, named in a config as "tests.faults.rewards:digits".

The bad ones go wrong for some responses, which depend on the text alone.
"""

import math
import os
import time
import zlib

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def digits(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """The share of tokens that are digits: a random model can earn it, so that advantages are not all zero."""
    words = response.split()
    return RewardResult(sum(word.isdigit() for word in words) / max(len(words), 1))


def by_text(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Between 0 and 1, and of two different responses hardly ever the same."""
    return RewardResult(zlib.crc32(response.encode()) / 2**32)


def raises(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Raises for some responses."""
    if _is_chosen(response):
        raise KeyError("injected")
    return digits(prompt, response, finish_reason)


def raises_for_most(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Raise for responses of more than two words; reference answers are shorter."""
    if len(response.split()) > 2:
        raise KeyError("injected")
    return digits(prompt, response, finish_reason)


def hangs(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Never returns for some responses."""
    if _is_chosen(response):
        time.sleep(1e6)
    return digits(prompt, response, finish_reason)


def hangs_if_marked(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Never returns for responses with a "#"."""
    if "#" in response:
        time.sleep(1e6)
    return digits(prompt, response, finish_reason)


def eats_memory(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Allocates without end for some responses."""
    eaten: list[bytearray] = []
    while _is_chosen(response):
        eaten.append(bytearray(1 << 24))
    return digits(prompt, response, finish_reason)


def dies(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Ends its process for some responses."""
    if _is_chosen(response):
        os._exit(9)
    return digits(prompt, response, finish_reason)


def is_nan(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """NaN for some responses."""
    return RewardResult(math.nan) if _is_chosen(response) else digits(prompt, response, finish_reason)


def always_raises(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Raises."""
    raise KeyError("injected")


def always_one(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """1, so that no group has any variance."""
    return RewardResult(1.0)


def _is_chosen(response: str) -> bool:
    return zlib.crc32(response.encode()) % 6 == 0
