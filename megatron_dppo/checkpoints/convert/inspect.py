"""Compares two checkpoints bit for bit, and lists the contents of one from its headers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.architectures.sizes import architecture_of
from megatron_dppo.architectures.weight_map import is_adapter
from megatron_dppo.checkpoints.checkpoint_folder import WEIGHTS, is_megatron_checkpoint
from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource, WeightSource
from megatron_dppo.checkpoints.convert.stored_tensors import StoredTensors
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import read_convertible_config


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


def compare(
    first: WeightSource, second: WeightSource, on_bytes: Callable[[int], object] = lambda _: None
) -> Comparison:
    """Compare every tensor bit for bit, one group at a time."""
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


_OPTIMIZER = "optimizer."


def contents_of(folder: Path, *, is_listing: bool = False) -> Iterator[str]:
    """Yield kind, architecture, numbers, bytes and types of a checkpoint."""
    hf = read_convertible_config(folder)
    is_megatron = is_megatron_checkpoint(folder)
    kind = "Megatron checkpoint" if is_megatron else "Hugging Face folder"
    yield f"{folder}: {kind} of {architecture_of(hf)}"
    if is_megatron:
        stored = StoredTensors(folder / WEIGHTS)
        tensors, files = stored.outline(), stored.files
    else:
        source = HuggingFaceSource(HFWeights(folder))
        tensors, files = source.outline(), source.files
        if source.weights.left_out:
            yield f"left out: {len(source.weights.left_out)} tensors, of vision or of further tokens' layers"
    yield _count("weights", {k: t for k, t in tensors.items() if not _is_beside(k)})
    adapters = {k: t for k, t in tensors.items() if is_adapter(k) and not k.startswith(_OPTIMIZER)}
    optimizer = {k: t for k, t in tensors.items() if k.startswith(_OPTIMIZER)}
    yield from (_count(*pair) for pair in (("LoRA", adapters), ("optimizer", optimizer)) if pair[1])
    yield f"files: {len(files)}, {sum(file.stat().st_size for file in files) / 1e9:.3f} GB"
    if is_listing:
        for key, tensor in tensors.items():
            yield f"{key} {_dtype(tensor)} {tuple(tensor.shape)}"


def _is_beside(key: str) -> bool:
    return key.startswith(_OPTIMIZER) or is_adapter(key)


def _count(what: str, tensors: Mapping[str, Tensor]) -> str:
    dtypes = Counter(_dtype(tensor) for tensor in tensors.values())
    elements = sum(tensor.numel() for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    kinds = ", ".join(f"{number} {dtype}" for dtype, number in dtypes.most_common())
    return f"{what}: {len(tensors)} tensors ({kinds}), {elements:,} elements, {size / 1e9:.3f} GB"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
