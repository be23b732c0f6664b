"""A reward of one's own: data.reward = "examples.tiny_reward:even_words", started in the repository's root."""

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def even_words(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """The share of words that end in an even digit: a random model earns about half, with some variance."""
    words = response.split()
    return RewardResult(sum(word[-1] in "02468" for word in words) / max(len(words), 1))
