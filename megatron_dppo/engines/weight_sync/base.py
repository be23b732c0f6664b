"""Interfaces of weight sync: the owner of the weights, the transport, and the push."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megatron_dppo.engines.weight_sync.fleet import Fleet

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Iterates over weights in Hugging Face names; the ranks that hold them iterate together."""


class WeightOwner(Protocol):
    """The source of the weights that a sync sends: an actor, or a checkpoint on disk."""

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in Hugging Face names, or this stage's, as `export_hf_weights` does."""
        ...

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors that `weights` yields, without data; every rank calls it."""
        ...

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """This rank's pipeline stage, the number of stages, and whether this rank speaks for its stage."""
        ...

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """Return log-probs as `Actor.log_probs` does; none where there is no model that computes them."""
        ...


class WeightSync(Protocol):
    """Pushes the actor's weights, in Hugging Face names, to wherever samples come from.

    Every rank calls each method together. Between a push's begin and its end no sample may be drawn.
    """

    def prepare_push(self) -> None:
        """Compute what the next push needs of the trainer, which may leave its GPU before the push."""
        ...

    def push(self, version: int) -> dict[str, float]:
        """Send all weights, each tensor exactly once, and verify that they arrived.

        Args:
            version: What samples drawn with these weights will report.

        Returns:
            Metrics of this push, the same on every rank.

        Raises:
            WeightSyncError: A tensor is missing or came twice, or no receiver has all of them.
        """
        ...

    def release_engine(self) -> None:
        """Release the engine's memory until the next push, where it takes turns with the trainer.

        What it samples is aborted.

        Raises:
            WeightSyncError: It keeps its memory.
        """
        ...

    def close(self) -> None:
        """Close the connections between trainer and engine."""
        ...


class Transport(Protocol):
    """A way of sending weights to the servers of a fleet."""

    @property
    def needs_begin(self) -> bool:
        """Whether servers take weights this way between `begin` and `end` alone."""
        ...

    def send(self, fleet: Fleet, version: int) -> None:
        """Send all weights to the fleet's members, between `begin` and `end`; members that fail leave it.

        Every rank calls it together; afterwards all ranks' fleets are equal.
        """
        ...

    def close(self) -> None:
        """Leave groups, free memory."""
        ...
