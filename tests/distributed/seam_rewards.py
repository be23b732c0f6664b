"""User code that records its inputs: a reward, an environment and a generate function.

Named in a config as "tests.distributed.seam_rewards:<name>"; imported by workers, so that it imports little.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dppo.environments import Observation, Turn
from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt


def heard(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Reward by length, with a label for a response that was cut at its length limit."""
    return RewardResult(len(response.split()) % 3 / 2, {"was_cut": float(finish_reason == "length")})


class Nodding:
    """Replies with one word to each response except the last, and leaves the reward to `data.reward`."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Return the prompt only."""
        return Observation(text=prompt.text)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Continue without an end."""
        return Turn("=", None, done=False)


def plainly(engine: Any, requests: Sequence[Any], params: Any) -> Sequence[Any]:
    """Return the engine's completions."""
    return engine.generate(requests, params)


def by_answer(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Reward in [0, 1] from the response's text and the reference answer."""
    return RewardResult(zlib.crc32(f"{prompt.answer}: {response}".encode()) / 2**32)


def slow(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Take 2 s for about half of the responses, and none for reference answers."""
    is_slow = _is_chosen(response)
    time.sleep(2.0 * is_slow)
    return RewardResult(float(is_slow))


def large(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    """Take 400 MiB for about half of the responses, and none for reference answers."""
    size = len(bytearray(400 << 20 if _is_chosen(response) else 1))
    return RewardResult(float(size > 1))


def _is_chosen(response: str) -> bool:
    return len(response.split()) > 2 and zlib.crc32(response.encode()) % 2 == 0


_tried: set[str] = set()


def fails_first(prompt: Prompt, response: str, finish_reason: FinishReason) -> float:
    """Raise when a response is seen for the first time, and never for reference answers."""
    if len(response.split()) > 2 and response not in _tried:
        _tried.add(response)
        raise ConnectionError("try again")
    return len(response) % 2


class Loud(Nodding):
    """Say another word than Nodding."""

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Go on for ever."""
        return Turn("w7", None, done=False)


class Endless(Nodding):
    """Reward each turn by itself, and end only at the limit of turns."""

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Reward a turn by its text."""
        return Turn("=", zlib.crc32(response.encode()) / 2**32, done=False)


def first_words(engine: Any, requests: Sequence[Any], params: Any) -> Sequence[Any]:
    """Sample at most three tokens."""
    return engine.generate(requests, replace(params, max_response_tokens=3))


def steep(tokens: Any, options: Mapping[str, Any]) -> Any:
    """Keep tokens, or responses if the rule sees whole responses, up to a limit of divergence."""
    spent = tokens.divergence
    if tokens.responses is not None:
        spent = tokens.whole_responses.mean(spent)
    return spent <= options["limit"]
