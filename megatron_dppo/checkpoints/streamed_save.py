"""Writes a Megatron distributed checkpoint while its tensors are made, without holding all of them."""

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dppo.checkpoints.megatron_folder import finish_save, results_in_this_process
from megatron_dppo.mcore.fixes import plan_save

Places = list[tuple[int, int]]
"""Where each item of a file begins, and its length, in bytes."""


@dataclass(frozen=True)
class Block:
    """One of the equal parts of a stored tensor."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class StreamedFile:
    """One file of the checkpoint, with its items in writing order."""

    name: str
    items: tuple[tuple[Any, Block], ...]  # with torch's plan of writing each
    objects: tuple[Any, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file's tensors."""
        return sum(block.num_bytes for _, block in self.items)


class StreamedSave:
    """A save that all ranks plan together; its files may be written in any thread, at any time."""

    def __init__(self, own: Sequence[Block], folder: Path, rank: int, file_bytes: int) -> None:
        """Plan the save; every rank calls this together, and all ranks' blocks cover each tensor once.

        Args:
            own: This rank's blocks, in the order in which they are written.
            folder: Empty folder for the checkpoint.
            rank: Rank of this process.
            file_bytes: Most bytes per file. A new file starts when the current one would exceed this.
        """
        states = {str(i): _on_meta(block) for i, block in enumerate(own)}
        with results_in_this_process():
            self._request: Any = plan_save(states, folder)
        buckets: list[Any] = [] if self._request.async_fn is None else self._request.async_fn_args[1]
        self._num_buckets = len(buckets)
        planned = [item for *_, (_, tensors) in buckets for item, _ in tensors]
        objects = [pair for *_, (pairs, _) in buckets for pair in pairs]
        item_of = {(item.index.fqn, tuple(item.index.offset)): item for item in planned}
        assert len(item_of) == len(own), "each block is planned once"
        items = [(item_of[block.key, block.offset], block) for block in own]
        self.files = list(_files(items, objects, rank, file_bytes))

    def write(self, file: StreamedFile, path: Path, tensor_of: Callable[[Block], Tensor]) -> Places:
        """Write a file, in any thread.

        Args:
            file: One of `files`.
            path: Path to write; the finished file belongs in the folder under the file's own name.
            tensor_of: Function that makes a block's tensor, on the CPU and in new memory.

        Raises:
            OSError: The disk is full, or fails in another way.
        """
        outcomes: Any = queue.Queue()
        unfinished: Any = queue.Queue()
        unfinished.put(0)
        tensors = _Tensors(file.items, tensor_of)
        bucket: Any = (str(path), file.name, (list(file.objects), tensors))
        transforms = self._request.async_fn.args[0]
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, outcomes, unfinished, True)
        _, written = outcomes.get()
        if tensors.error is not None:
            raise tensors.error
        if isinstance(written, Exception):
            raise OSError(f"{written}") from written
        return [(result.storage_data.offset, result.storage_data.length) for result in written]

    def finish(self, places: Mapping[str, Places]) -> None:
        """Make the folder a checkpoint; every rank calls this after all ranks have written all files.

        Args:
            places: Result of `write` for each of this rank's files, by name, from this start or an earlier one.

        Raises:
            CheckpointError: The metadata could not be written; raised on every rank.
        """
        results = [result for file in self.files for result in _results(file, places[file.name])]
        if self._num_buckets:
            empty = {index: list[WriteResult]() for index in range(1, self._num_buckets)}
            self._request.async_fn_args[2].put({0: results, **empty})
        finish_save(self._request)


class _Tensors:
    """Iterable of tensors for Megatron's writer; keeps an error raised while a tensor is made."""

    def __init__(self, items: Sequence[tuple[Any, Block]], tensor_of: Callable[[Block], Tensor]) -> None:
        self._items, self._tensor_of = items, tensor_of
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for item, block in self._items:
            try:
                tensor = self._tensor_of(block)
                assert tensor.shape == block.shape and tensor.dtype == block.dtype, block
            except Exception as error:
                self.error = error
                raise
            yield item, tensor


def _on_meta(block: Block) -> ShardedTensor:
    axes = enumerate(zip(block.whole, block.offset, block.shape, strict=True))
    split = [(axis, offset // size, whole // size) for axis, (whole, offset, size) in axes if whole != size]
    tensor = torch.empty(block.shape, dtype=block.dtype, device="meta")
    return ShardedTensor.from_rank_offsets(block.key, tensor, *split)


def _files(
    items: Sequence[tuple[Any, Block]], objects: Sequence[Any], rank: int, file_bytes: int
) -> Iterator[StreamedFile]:
    """Split items into files, in order; a rank's objects come first."""
    run: list[tuple[Any, Block]] = []
    size = number = 0
    first = tuple(objects)
    for item in items:
        if run and size + item[1].num_bytes > file_bytes:
            yield StreamedFile(f"__{rank}_{number}.distcp", tuple(run), first)
            run, size, number, first = [], 0, number + 1, ()
        run.append(item)
        size += item[1].num_bytes
    if run or first:
        yield StreamedFile(f"__{rank}_{number}.distcp", tuple(run), first)


def _results(file: StreamedFile, places: Places) -> Iterator[WriteResult]:
    planned = [item for item, _ in (*file.objects, *file.items)]
    for item, (offset, length) in zip(planned, places, strict=True):
        yield WriteResult(item.index, length, _StorageInfo(file.name, offset, length))
