"""Environments that do what a response tells them to; workers import this module by its name."""

import os
import time

from megatron_dppo.environments import Observation, Turn
from megatron_dppo.types import FinishReason, Prompt


class Told:
    """Counts its turns; a response names what it should do."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Open with the prompt, and the seed behind it."""
        if prompt.answer == "closed":
            raise ValueError("closed")
        self.said: list[str] = []
        if prompt.messages is not None:
            return Observation(messages=prompt.messages)
        return Observation(f"{prompt.text} {seed}")

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Misbehave in the way the response names, and otherwise return the earlier responses."""
        self.said.append(response)
        if response == "raise":
            raise KeyError("lost")
        if response == "hang":
            time.sleep(600)
        if response == "die":
            os._exit(3)
        if response == "eat":
            bytearray(1 << 30)
        if response == "mumble":
            return None  # type: ignore[return-value]
        return Turn(" ".join(self.said), float(len(self.said)), response == "end", {"pid": float(os.getpid())})
