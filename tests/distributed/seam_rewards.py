"""Code of a user's own that says what it was told: a reward, an environment, a generate function and a rule.

Named in a config as "tests.distributed.seam_rewards:<name>"; imported by workers, so that it imports little.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.environments import Observation, Turn
from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def heard(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Earns by length, and says whether the response is called cut."""
    return RewardResult(len(response.split()) % 3 / 2, {"was_cut": float(finish_reason == "length")})


class Nodding:
    """Says one word to each response but the last it will hear, and leaves the reward to `data.reward`."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Nothing but the prompt."""
        return Observation(text=prompt.text)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Goes on for ever."""
        return Turn("=", None, done=False)


def plainly(engine: Any, requests: Sequence[Any], params: Any) -> Sequence[Any]:
    """What the engine says."""
    return engine.generate(requests, params)


def limited(tokens: Any, options: Mapping[str, Any]) -> Any:
    """Keep responses of little divergence."""
    return tokens.whole_responses.mean(tokens.divergence) <= options["limit"]
