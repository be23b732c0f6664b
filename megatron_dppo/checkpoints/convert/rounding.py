"""Measures the rounding loss of weights that are written in a narrower dtype."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.checkpoints.convert.sources import Source

_ELEMENTS = 1 << 22
"""Elements that are compared at a time, so that temporary tensors stay small."""


@dataclass
class Loss:
    """Sums over the rounded weights.

    Attributes:
        num_weights: Number of rounded weights.
        num_changed: Number of weights that rounding changes.
        relative: Sum of |rounded - weight| / |weight| over weights other than 0.
        largest: Largest of these quotients.
        num_moved: Number of weights that differ from the base model.
        num_lost: Number of `num_moved` weights with the same rounded value as the base model's.
    """

    num_weights: int = 0
    num_changed: int = 0
    relative: float = 0.0
    largest: float = 0.0
    num_moved: int = 0
    num_lost: int = 0

    def add(self, other: "Loss") -> None:
        """Add the sums of other weights."""
        largest = max(self.largest, other.largest)
        sums = [mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)]
        self.__init__(*sums)
        self.largest = largest

    def lines(self, dtype: torch.dtype, base: Path | None) -> Iterator[str]:
        """Yield sentences about the loss; yield nothing if no weight was rounded."""
        name = str(dtype).removeprefix("torch.")
        if not self.num_weights:
            return
        changed, mean = self.num_changed / self.num_weights, self.relative / self.num_weights
        yield (
            f"--dtype {name} changed {changed:.2%} of {self.num_weights:,} weights, by {mean:.2%} of "
            f"their size on average and {self.largest:.2%} at most"
        )
        if base is not None and self.num_moved:
            lost = self.num_lost / self.num_moved
            yield (
                f"of {self.num_moved:,} weights that differ from {base}, {lost:.2%} have its value again in "
                f"{name}: this part of the training is lost"
            )


@dataclass
class Rounding:
    """Rounds weights and adds up the loss; threads may share an instance.

    Attributes:
        base: Model that training started from; None if it is not known.
        loss: Loss so far.
    """

    base: Source | None = None
    loss: Loss = field(default_factory=Loss)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def base_tensors(self, names: Sequence[str], is_rounding: bool) -> Mapping[str, Tensor]:
        """Read the base model's tensors of one group, if they are compared."""
        return dict(self.base.read(names)) if self.base is not None and is_rounding else {}

    def cast(self, tensor: Tensor, dtype: torch.dtype, base: Tensor | None = None) -> Tensor:
        """Return a tensor in a dtype, and count its loss if the dtype cannot hold each value.

        Args:
            tensor: Floating-point tensor; returned unchanged if it has the dtype.
            dtype: Dtype of the result.
            base: Base model's tensor, of the same shape.
        """
        cast = tensor.to(dtype)
        if torch.promote_types(tensor.dtype, dtype) != dtype:
            found = Loss()
            for parts in _pieces(tensor, cast, base):
                found.add(_loss(*parts))
            with self._lock:
                self.loss.add(found)
        return cast


def _pieces(
    tensor: Tensor, cast: Tensor, base: Tensor | None
) -> Iterable[tuple[Tensor, Tensor, Tensor | None]]:
    flat = [each.reshape(-1).split(_ELEMENTS) for each in (tensor, cast, *(() if base is None else (base,)))]
    for parts in zip(*flat, strict=True):
        yield parts[0], parts[1], parts[2] if len(parts) > 2 else None


def _loss(weights: Tensor, rounded: Tensor, base: Tensor | None) -> Loss:
    exact = weights.double()
    error = (rounded.double() - exact).abs()
    relative = torch.where(exact == 0, 0.0, error / exact.abs())
    moved = (
        weights != base.to(weights.dtype) if base is not None else torch.zeros_like(weights, dtype=torch.bool)
    )
    lost = moved & (rounded == base.to(rounded.dtype)) if base is not None else moved
    return Loss(
        num_weights=weights.numel(),
        num_changed=int((error > 0).sum()),
        relative=float(relative.sum()),
        largest=float(relative.max()),
        num_moved=int(moved.sum()),
        num_lost=int(lost.sum()),
    )
