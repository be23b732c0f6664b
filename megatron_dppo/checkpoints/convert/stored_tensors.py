"""The tensors in a Megatron distributed checkpoint: reads parts of them, and maps Hugging Face tensors to them.

A distributed checkpoint contains unsplit tensors, whatever layout wrote it. It has the keys of Megatron's
Transformer Engine spec, which our `torch` spec writes too. If all layers are alike, each parameter is one
tensor with an axis for the layers. The experts of a layer are always one tensor. Reading needs no Megatron.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes
from megatron_dppo.architectures.weight_map import Shape, WeightRule
from megatron_dppo.architectures.weight_table import WeightTable
from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.errors import CheckpointError

_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError)


class StoredTensors:
    """Reads tensors of a distributed checkpoint on demand."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata of a folder with `.metadata` and `*.distcp` files."""
        refuse_code(folder)
        self.folder = folder
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        found: dict[str, Any] = dict(metadata.state_dict_metadata)
        self._tensors: dict[str, TensorStorageMetadata] = {
            key: kind for key, kind in found.items() if isinstance(kind, TensorStorageMetadata)
        }
        self.files = sorted({folder / str(place.relative_path) for place in metadata.storage_data.values()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each unsplit tensor, by key."""
        return {key: tuple(tensor.size) for key, tensor in self._tensors.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each tensor, by key."""
        return {key: tensor.properties.dtype for key, tensor in self._tensors.items()}

    def outline(self) -> dict[str, Tensor]:
        """Return each unsplit tensor on the meta device (shape and dtype), by key."""
        dtypes = self.dtypes
        return {key: torch.empty(shape, dtype=dtypes[key], device="meta") for key, shape in self.shapes.items()}

    def region(self, key: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read a block of a tensor into new memory on the CPU."""
        if key not in self._tensors:
            raise CheckpointError(
                f"{self.folder} has no {key!r}. The checkpoint has another format, or is of another model than "
                "its config.json."
            )
        stored, block = self._tensors[key], torch.empty(shape, dtype=self.dtypes[key])
        wanted = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        found = sum(item.lengths.numel() for item in items)
        if found != block.numel():
            raise CheckpointError(
                f"{self.folder}: {key!r} of shape {tuple(stored.size)} holds {found} of the {block.numel()} "
                f"elements from {offset} on of shape {shape}. The checkpoint is incomplete; make it again."
            )
        try:
            self._reader.read_data(LoadPlan(items), _Into(block))
        except _READ_ERRORS as error:
            files = sorted({self._file_of(item) for item in items})
            reason = str(error).splitlines()[0][:200] if str(error) else repr(error)
            raise CheckpointError(
                f"{self.folder}: {key!r} cannot be read from {', '.join(files)}: torn ({reason}). "
                "Name another checkpoint, or make it again."
            ) from error
        return block

    def _file_of(self, item: ReadItem) -> str:
        return str(self._reader.storage_data[item.storage_index].relative_path)


class _Into(DefaultLoadPlanner):
    """Load planner that reads into one block."""

    def __init__(self, block: Tensor) -> None:
        super().__init__()
        self._block = block

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the block that an item fills."""
        part = self._block
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the item was read in place."""


@dataclass(frozen=True)
class Piece:
    """A block of a stored tensor, and the Hugging Face tensors in it.

    Attributes:
        rule: Weight rule of the parameter that the block belongs to.
        key: Key of the stored tensor.
        whole: Shape of the stored tensor.
        offset: Position of the block in the stored tensor.
        shape: Shape of the block, including axes for layers and experts.
        hf: Names of the Hugging Face tensors, in their order in the block.
        hf_shapes: Shapes of the Hugging Face tensors.
        layer: Global 0-based layer; None outside layers.
    """

    rule: WeightRule
    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layer: int | None

    @property
    def num_elements(self) -> int:
        """Number of elements in the block."""
        return torch.Size(self.shape).numel()

    @property
    def has_layer_axis(self) -> bool:
        """Whether the stored tensor stacks all layers."""
        return self.layer is not None and not self.key.startswith(f"decoder.layers.{self.layer}.")

    def fuse(self, tensors: Sequence[Tensor], table: WeightTable) -> Tensor:
        """Fuse the block's Hugging Face tensors, in order, into new memory."""
        if self.rule.is_expert:
            block = torch.stack(list(tensors))
        elif self.rule.is_interleaved:
            block = table.fuse(self.rule, tensors)
        else:
            block = tensors[0].clone(memory_format=torch.contiguous_format)
        return block.reshape(self.shape)

    def unfuse(self, block: Tensor, table: WeightTable) -> list[Tensor]:
        """Split the block into its Hugging Face tensors, as views if possible."""
        if self.rule.is_expert:
            return list(block.reshape(len(self.hf), *self.hf_shapes[0]).unbind())
        if self.rule.is_interleaved:
            return table.unfuse(self.rule, block.reshape(-1, *self.hf_shapes[0][1:]))
        return [block.reshape(self.hf_shapes[0])]


def pieces_of(hf: HFConfig, max_elements: int | None = None) -> Iterator[Piece]:
    """Yield every block of a model's checkpoint; each Hugging Face tensor is in exactly one of them.

    Args:
        hf: The model's config.json.
        max_elements: Most elements of a block. Stacks of experts are cut into equal blocks of at least one
            expert. None keeps each stack of a layer's experts in one block.
    """
    family = family_of(hf)
    sizes = family.sizes_of(hf)
    # Megatron takes a list to mean that layers differ.
    are_layers_alike = isinstance(family.megatron_config(hf).get("moe_layer_freq", 1), int) and not sizes.linear
    for entry in family.entries(sizes):
        for piece in _of_parameter(entry.rule, entry.layer, sizes, max_elements):
            yield _with_layer_axis(piece, sizes) if are_layers_alike and entry.layer is not None else piece


def stored_key(rule: WeightRule, layer: int | None, sizes: ModelSizes) -> str:
    """Return the key of a parameter in Megatron's checkpoint, before layers are stacked."""
    name = rule.transformer_engine or rule.megatron
    is_dense_norm = ".linear_fc1.layer_norm_" in name  # fused into the MLP, which MoE layers do not have
    if is_dense_norm and layer in sizes.moe_layers:
        name = rule.megatron
    if rule.is_expert:
        name = name.removesuffix("{local}").replace(".mlp.experts.", ".mlp.experts.experts.")
    return name.format(layer=layer)


def without_layer(key: str) -> str:
    """Return the key that all layers share: "decoder.layers.mlp.x" for "decoder.layers.3.mlp.x"."""
    head, layers, rest = key.partition("decoder.layers.")
    return head + layers + rest.partition(".")[2] if layers else key


def _of_parameter(
    rule: WeightRule, layer: int | None, sizes: ModelSizes, max_elements: int | None
) -> Iterator[Piece]:
    key, of_hf = stored_key(rule, layer, sizes), rule.hf_shapes(sizes)
    whole = (sum(shape[0] for shape in of_hf), *of_hf[0][1:])
    parts = [of_hf] if rule.is_interleaved else [(shape,) for shape in of_hf]
    first_row = index = 0
    for part in parts:
        rows = sum(shape[0] for shape in part)
        names = tuple(rule.hf[index : index + len(part)])
        offset = (first_row, *(0 for _ in whole[1:]))
        piece = Piece(rule, key, whole, offset, (rows, *whole[1:]), names, part, layer)
        first_row, index = first_row + rows, index + len(part)
        yield from map(_name_layer, _by_experts(piece, sizes, max_elements) if rule.is_expert else (piece,))


def _by_experts(piece: Piece, sizes: ModelSizes, max_elements: int | None) -> Iterator[Piece]:
    assert sizes.num_experts is not None, "a model with expert rules has experts"
    num_experts, one = sizes.num_experts, piece.num_elements
    fitting = num_experts if max_elements is None else max(1, max_elements // one)
    width = max(n for n in range(1, num_experts + 1) if num_experts % n == 0 and n <= fitting)
    for first in range(0, num_experts, width):
        names = tuple(piece.hf[0].replace("{expert}", str(first + i)) for i in range(width))
        yield replace(
            piece,
            whole=(num_experts, *piece.whole),
            offset=(first, *piece.offset),
            shape=(width, *piece.shape),
            hf=names,
            hf_shapes=piece.hf_shapes * width,
        )


def _name_layer(piece: Piece) -> Piece:
    return replace(piece, hf=tuple(name.format(layer=piece.layer) for name in piece.hf))


def _with_layer_axis(piece: Piece, sizes: ModelSizes) -> Piece:
    assert piece.layer is not None
    return replace(
        piece,
        key=without_layer(piece.key),
        whole=(sizes.num_layers, *piece.whole),
        offset=(piece.layer, *piece.offset),
        shape=(1, *piece.shape),
    )
