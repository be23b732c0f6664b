"""Interfaces of weight sync: the owner of the weights, the transport, and the push."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from megatron_dppo.engines.weight_sync.fleet import Fleet

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Returns an iterator over weights in Hugging Face names; the ranks that hold them iterate together."""


class WeightOwner(Protocol):
    """The source of the weights that a sync sends: an actor, or a checkpoint on disk."""

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, or this pipeline stage's, in Hugging Face names; see `export_hf_weights`."""
        ...

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors that `weights` yields, without data; every rank calls it."""
        ...

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """This rank's pipeline stage, the number of stages, and whether this rank sends for its stage."""
        ...

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """Function that computes log-probs like `Actor.log_probs`, or None without a model."""
        ...


class WeightSync(Protocol):
    """Pushes the actor's weights, in Hugging Face names, to the rollout engine.

    All ranks call each method together. No sample may be drawn during a push.
    """

    def prepare_push(self) -> None:
        """Compute what the next push needs from the trainer, which may leave its GPU before the push."""
        ...

    def push(self, version: int) -> dict[str, float]:
        """Send all weights, each tensor exactly once, and verify that they arrived.

        Args:
            version: Weight version that samples drawn with these weights report.

        Returns:
            Metrics of this push, the same on every rank.

        Raises:
            WeightSyncError: A tensor is missing or came twice, or no receiver has all tensors.
        """
        ...

    def release_engine(self) -> None:
        """Release the engine's memory until the next push, if engine and trainer take turns on the GPU.

        Its requests are aborted.

        Raises:
            WeightSyncError: The engine keeps its memory.
        """
        ...

    def close(self) -> None:
        """Close the connections between trainer and engine."""
        ...


class Transport(Protocol):
    """A way of sending weights to the servers of a fleet."""

    @property
    def needs_begin(self) -> bool:
        """Whether servers accept weights only between `begin` and `end` with this transport."""
        ...

    def send(self, fleet: Fleet, version: int) -> None:
        """Send all weights to the members of a fleet, between `begin` and `end`; members that fail leave it.

        All ranks call it together. Afterwards their fleets are equal.
        """
        ...

    def close(self) -> None:
        """Leave process groups, and free memory."""
        ...
