"""Interfaces of weight sync, and the buckets in which weights travel."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
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
        """
        ...

    def release_engine(self) -> None:
        """Release the engine's memory until the next push, if engine and trainer take turns on the GPU.

        Its requests are aborted.
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


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype, end to end in one buffer that the next bucket overwrites."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor  # [n]

    @property
    def dtype(self) -> str:
        """Name of the dtype in torch, such as "bfloat16"."""
        return str(self.flat.dtype).removeprefix("torch.")


class Buffer:
    """Memory for buckets, kept from one push to the next."""

    def __init__(
        self, num_bytes: int, *, is_shared: bool = False, together: Mapping[str, str] | None = None
    ) -> None:
        """Store the sizes, and allocate nothing.

        Args:
            num_bytes: Size of a bucket. A larger tensor or group of tensors gets its own bucket.
            is_shared: Whether other processes can map the buffer, if it is in CPU memory.
            together: Group name of each tensor that must share a bucket with others; see
                `WeightRule.travels_with`.
        """
        self._num_bytes, self._is_shared, self._together = num_bytes, is_shared, together or {}
        self._memory: Tensor | None = None

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        """Copy weights into buckets, in order; taking the next bucket overwrites the previous one."""
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        used, dtype = 0, torch.uint8
        for unit in self._units(weights):
            tensors = [tensor for _, tensor in unit]
            size = sum(tensor.nbytes for tensor in tensors)
            if names and (used + size > self._num_bytes or tensors[0].dtype != dtype):
                yield self._bucket(names, shapes, used, dtype)
                names, shapes, used = [], [], 0
            memory, dtype = self._at_least(used + size, tensors[0].device), tensors[0].dtype
            for name, tensor in unit:
                memory[used : used + tensor.nbytes].view(dtype).copy_(tensor.reshape(-1))
                names.append(name)
                shapes.append(tuple(tensor.shape))
                used += tensor.nbytes
        if names:
            yield self._bucket(names, shapes, used, dtype)

    def _units(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield tensors that must stay together: the consecutive tensors of one group, or a single tensor."""
        begun = set[str]()
        for group, members in itertools.groupby(weights, lambda pair: self._together.get(pair[0])):
            if group is None:
                yield from ([member] for member in members)
                continue
            unit = list(members)
            assert group not in begun and len({t.dtype for _, t in unit}) == 1, f"{group} comes in one piece"
            begun.add(group)
            yield unit

    def _bucket(self, names: list[str], shapes: list[tuple[int, ...]], used: int, dtype: torch.dtype) -> Bucket:
        assert self._memory is not None
        return Bucket(tuple(names), tuple(shapes), self._memory[:used].view(dtype))

    def _at_least(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory of at least that size. It grows only for an empty bucket, and is freed before."""
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None
            self._memory = torch.empty(max(num_bytes, self._num_bytes), dtype=torch.uint8, device=device)
            if self._is_shared:
                self._memory.share_memory_()  # does nothing on a GPU: CUDA has its own handles
        return self._memory
