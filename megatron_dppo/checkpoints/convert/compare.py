"""Compares two checkpoints of either kind bit for bit, under their Hugging Face names."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.checkpoints.convert.sources import Source


@dataclass(frozen=True)
class Comparison:
    """Tensors that are equal, that differ, or that only one checkpoint has."""

    num_equal: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    different: tuple[str, ...]  # "name: how", for tensors that both have

    @property
    def is_equal(self) -> bool:
        """Whether the checkpoints are equal."""
        return not (self.only_first or self.only_second or self.different)


def compare(first: Source, second: Source, on_bytes: Callable[[int], object] = lambda _: None) -> Comparison:
    """Compare every tensor bit for bit, one group at a time.

    Args:
        first: Source of the conversion.
        second: Result of the conversion.
        on_bytes: Callback with the bytes of each compared tensor.

    Raises:
        CheckpointError: One of the checkpoints is torn.
    """
    outlines = first.outline(), second.outline()
    common = outlines[0].keys() & outlines[1].keys()
    different: list[str] = []
    coarser = min(first.groups(), second.groups(), key=len)  # its groups hold the other's whole ones
    for group in coarser:
        names = [name for name in group if name in common]
        kinds = {name: [f"{o[name].dtype} {tuple(o[name].shape)}" for o in outlines] for name in names}
        different += [f"{name}: {' and '.join(kinds[name])}" for name in names if len(set(kinds[name])) > 1]
        alike = [name for name in names if len(set(kinds[name])) == 1]
        theirs = dict(second.read(alike)) if alike else {}
        for name, tensor in first.read(alike) if alike else ():
            num_different = _num_different(tensor, theirs.pop(name))
            if num_different:
                different.append(f"{name}: {num_different} of {tensor.numel()} elements")
            on_bytes(tensor.nbytes)
    return Comparison(
        len(common) - len(different),
        tuple(sorted(outlines[0].keys() - common)),
        tuple(sorted(outlines[1].keys() - common)),
        tuple(different),
    )


def _num_different(first: Tensor, second: Tensor) -> int:
    """Count elements with different bits: NaNs with equal bits are equal, and -0 differs from 0."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.itemsize]
    pair = (first.contiguous().view(bits), second.contiguous().view(bits))
    return 0 if torch.equal(*pair) else int((pair[0] != pair[1]).sum())
