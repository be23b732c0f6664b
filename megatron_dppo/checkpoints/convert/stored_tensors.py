"""Reads parts of the tensors in a Megatron distributed checkpoint, without Megatron and in any thread."""

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

from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.errors import CheckpointError

_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError)


class StoredTensors:
    """Reads tensors of a distributed checkpoint on demand."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata.

        Args:
            folder: Folder with `.metadata` and `*.distcp` files.

        Raises:
            CheckpointError: The folder is torn, or contains code.
        """
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
        """Read a block of a tensor into new memory on the CPU.

        Raises:
            CheckpointError: The block is missing or incomplete, or its file is torn.
        """
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
