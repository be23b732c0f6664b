"""How trained weights reach the rollout engine."""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from megatron_dppo.weight_sync.fleet import Fleet

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Iterates over weights in Hugging Face names; the ranks that hold them iterate together."""


class WeightSync(Protocol):
    """Pushes the actor's weights, in Hugging Face names, to wherever samples come from.

    Every rank calls each method together. Between a push's begin and its end no sample may be drawn.
    """

    def push(self, version: int) -> dict[str, float]:
        """Send all weights, each tensor exactly once, and see that they arrived.

        Args:
            version: What samples drawn with these weights will report.

        Returns:
            Metrics of this push, the same on every rank.

        Raises:
            WeightSyncError: A tensor is missing or came twice, or no receiver has all of them.
        """
        ...

    def release_engine(self) -> None:
        """Sampling is over until the next push: the engine may give its memory to the trainer."""
        ...

    def close(self) -> None:
        """Let go of what connects trainer and engine."""
        ...


class Transport(Protocol):
    """One way in which weights reach the servers of a fleet."""

    @property
    def needs_begin(self) -> bool:
        """Whether servers take weights this way between `begin` and `end` alone."""
        ...

    def send(self, fleet: Fleet, version: int) -> None:
        """Give all weights to the fleet's members, between their `begin` and `end`; who failed has left it.

        Every rank calls it together; afterwards all ranks' fleets are equal.
        """
        ...

    def close(self) -> None:
        """Leave groups, free memory."""
        ...
