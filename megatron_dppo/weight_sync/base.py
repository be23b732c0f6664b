"""Interfaces of weight sync: who has the weights, how they travel, and a push."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megatron_dppo.weight_sync.fleet import Fleet

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Iterates over weights in Hugging Face names; the ranks that hold them iterate together."""


class WeightOwner(Protocol):
    """Has the weights that a sync sends: an actor, or a checkpoint on disk."""

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """All weights in Hugging Face names, or this stage's; see `models.convert.export_hf_weights`."""
        ...

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """What `weights` yields, as tensors without data; every rank calls it."""
        ...

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """This rank's pipeline stage, the number of stages, and whether this rank speaks for its stage."""
        ...

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """See `Actor.log_probs`; none where there is no model that computes them."""
        ...


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
