"""Options for writing a checkpoint, and the loss when a narrower dtype rounds its weights."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.checkpoints.convert.sources import WeightSource
from megatron_dppo.errors import ConversionError

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

    base: WeightSource | None = None
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


@dataclass(frozen=True)
class WriteOptions:
    """Options of writing a checkpoint.

    Attributes:
        dtype: Dtype that tensors are rounded to, except tensors that stay float32. None keeps the source's.
        file_bytes: Most bytes per file. A new file starts when the current one would exceed this.
        num_writers: Number of files that a process writes at a time.
        on_bytes: Callback, in any thread, with the bytes of each finished tensor.
        rounding: Object that casts the tensors, and adds up the loss.
    """

    dtype: torch.dtype | None = None
    file_bytes: int = 4 << 30
    num_writers: int = 1
    on_bytes: Callable[[int], object] = lambda _: None
    rounding: Rounding = field(default_factory=Rounding)

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor is written in."""
        return tensor.dtype if self.dtype is None or stays_float32(name) else self.dtype


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that --dtype names; None keeps the checkpoint's dtype.

    Raises:
        ConversionError: The name is not a supported dtype.
    """
    if name is None:
        return None
    if name not in ("float32", "bfloat16"):
        raise ConversionError(
            f"--dtype: found {name!r}; expected float32 or bfloat16. Leave it out to keep every bit."
        )
    return getattr(torch, name)


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
