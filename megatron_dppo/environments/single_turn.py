"""The single-turn environment: one response ends it, and `data.reward` scores the response."""

from megatron_dppo.environments.base import Observation, Turn, register
from megatron_dppo.types import FinishReason, Prompt


@register("single_turn")
class SingleTurn:
    """Shows the prompt and ends with the first response; implements `Environment`."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """See `Environment.reset`."""
        return Observation(prompt.text, prompt.messages)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """See `Environment.step`."""
        return Turn(None, None, done=True)
