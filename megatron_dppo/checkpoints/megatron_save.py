"""Writes Megatron distributed checkpoints: a complete state, or tensors while they are made.

All ranks plan a save together, each writes its files, then all make the folder valid together. Megatron would
write from forked children. A thread is enough, since writing releases the interpreter lock, and no writer
survives a killed trainer.
"""

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from megatron_dppo.errors import CheckpointError
from megatron_dppo.mcore.fixes import plan_save


class PendingSave:
    """A save of a model's and an optimizer's state."""

    def __init__(self, state: dict[str, Any], folder: Path, *, is_copied: bool) -> None:
        """Plan the save of a sharded state into an existing empty folder; every rank calls this together.

        Args:
            state: Sharded state dict.
            folder: Empty folder to write to.
            is_copied: Keep copies on the host, so that training may change the tensors before they are written.
                Otherwise a tensor is copied from its device when it is written.
        """
        live = _storages(state)
        self._request = _plan(state, folder)
        self._buckets: list[Any] = []
        if self._request.async_fn is not None:
            self._buckets = self._request.async_fn_args[1]
        if is_copied and self._buckets:
            self._buckets = _copy(self._request.preload_fn(), live)

    def write(self) -> list[Path]:
        """Write and sync this rank's files, in any thread, without communicating with other ranks."""
        written: dict[int, Any] = {}
        for index, (path, key, (objects, tensors)) in enumerate(self._buckets):
            outcome = _write_file(self._request, index, (path, key, (objects, _OnHost(tensors))))
            if isinstance(outcome, Exception):
                raise OSError(f"{path}: {outcome}; is the disk full?") from outcome
            written[index] = outcome
        if self._buckets:
            self._request.async_fn_args[2].put(written)
        return [Path(path) for path, *_ in self._buckets]

    def finish(self) -> None:
        """Write the metadata that makes the folder loadable; every rank calls this after all have written."""
        self._buckets = []
        _finish_save(self._request)


def bytes_to_write(state: Any) -> int:
    """Return the bytes of a sharded state's tensors that this rank writes."""
    sharded, _ = extract_sharded_tensors_and_factories(state)
    return sum(each.data.nbytes for each in nested_values(sharded) if is_main_replica(each.replica_id))


class _OnHost:
    """Iterates over tensors for Megatron's writer, and copies each to the host when it is written."""

    def __init__(self, tensors: Sequence[tuple[Any, Tensor]]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for item, tensor in self._tensors:
            yield item, tensor.to("cpu")


def _storages(state: Any) -> set[int]:
    """Return the storages of a sharded state's tensors, which later training changes."""
    sharded, _ = extract_sharded_tensors_and_factories(state)
    return {each.data.untyped_storage().data_ptr() for each in nested_values(sharded)}


def _copy(buckets: Sequence[Any], live: set[int]) -> list[Any]:
    """Copy the tensors that share memory with the model or its optimizer; tensors from a device share none."""
    return [
        (path, key, (objects, [(item, _copy_if_live(tensor, live)) for item, tensor in tensors]))
        for path, key, (objects, tensors) in buckets
    ]


def _copy_if_live(tensor: Tensor, live: set[int]) -> Tensor:
    return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor


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
        self._request = _plan({str(i): _on_meta(block) for i, block in enumerate(own)}, folder)
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
        """
        tensors = _MadeTensors(file.items, tensor_of)
        written = _write_file(self._request, 0, (str(path), file.name, (list(file.objects), tensors)))
        if tensors.error is not None:
            raise tensors.error
        if isinstance(written, Exception):
            raise OSError(f"{written}") from written
        return [(result.storage_data.offset, result.storage_data.length) for result in written]

    def finish(self, places: Mapping[str, Places]) -> None:
        """Make the folder a checkpoint; every rank calls this after all ranks have written all files.

        Args:
            places: Result of `write` for each of this rank's files, by name, from this start or an earlier one.
        """
        results = [result for file in self.files for result in _results(file, places[file.name])]
        if self._num_buckets:
            empty = {index: list[WriteResult]() for index in range(1, self._num_buckets)}
            self._request.async_fn_args[2].put({0: results, **empty})
        _finish_save(self._request)


class _MadeTensors:
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


def _plan(state: dict[str, Any], folder: Path) -> Any:
    """Return Megatron's request of a save, with its results in a plain queue.

    Megatron otherwise starts a manager process by spawning, which takes seconds and runs the main module again.
    """
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        return plan_save(state, folder)
    finally:
        filesystem_async._results_queue = before


def _write_file(request: Any, index: int, bucket: Any) -> list[WriteResult] | Exception:
    """Write and sync one file of a planned save with Megatron's writer; return its results, or its error."""
    outcomes: Any = queue.Queue()
    unfinished: Any = queue.Queue()
    unfinished.put(index)
    transforms = request.async_fn.args[0]
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcomes, unfinished, True)
    return outcomes.get()[1]


def _finish_save(request: Any) -> None:
    """Write a planned save's metadata; every rank calls this after all ranks have written."""
    with _disk_errors_kept() as errors:
        try:
            for finalize in request.finalize_fns:
                finalize()
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint's metadata could not be written: {error}") from error
    reason: list[Any] = [str(errors[0]) if errors else None]
    dist.broadcast_object_list(reason, src=0)
    if reason[0] is not None:
        raise CheckpointError(f"the checkpoint's metadata could not be written: {reason[0]}")


@contextmanager
def _disk_errors_kept() -> Iterator[list[OSError]]:
    """Let rank 0 continue if Megatron cannot write metadata, because other ranks wait for it in collectives."""
    errors: list[OSError] = []

    def keeping(write: Callable[..., None]) -> Callable[..., None]:
        def write_or_keep(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except OSError as error:
                errors.append(error)

        return write_or_keep

    before = FileSystemWriterAsync.finish, serialization.save_config
    FileSystemWriterAsync.finish, serialization.save_config = map(keeping, before)
    try:
        yield errors
    finally:
        FileSystemWriterAsync.finish, serialization.save_config = before
