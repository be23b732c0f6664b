"""Soft overlong punishment: lowers the reward of responses that come close to the length limit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlongShaping:
    """Penalises responses that reach the last tokens of the limit (DAPO, arXiv:2503.14476, equation 13).

    Attributes:
        max_response_tokens: Where responses are cut.
        buffer_tokens: How many tokens before that cost, fewer than `max_response_tokens`.
        penalty: What all of them together cost.
    """

    max_response_tokens: int
    buffer_tokens: int
    penalty: float

    def __call__(self, num_tokens: int) -> float:
        """Return the addend to the reward of a response of `num_tokens`: 0.0 down to -penalty, linearly."""
        num_over = num_tokens - (self.max_response_tokens - self.buffer_tokens)
        return -min(num_over / self.buffer_tokens, 1.0) * self.penalty if num_over > 0 else 0.0
