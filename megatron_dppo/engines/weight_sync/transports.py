"""Sends weights to servers through memory that they map or a folder; the buckets in which weights travel."""

import base64
import itertools
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch.multiprocessing
from safetensors import SafetensorError
from torch import Tensor

from megatron_dppo.checkpoints.hf_folder import write_hf_checkpoint
from megatron_dppo.engines.weight_sync.fleet import Call, Fleet, Member
from megatron_dppo.errors import ConversionError, WeightSyncError
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Returns an iterator over weights in Hugging Face names; the ranks that hold them iterate together."""


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


class TensorTransport:
    """Sends server ranks handles to the buckets of the trainer ranks on their devices; a `Transport`.

    Server ranks are numbered in the order of the servers' names. The n-th server rank shares the device of the
    trainer's rank n. On GPUs a handle is a CUDA handle, so server and trainer must number the GPUs in the same
    way. Elsewhere it is a file in shared memory.
    """

    needs_begin = True

    def __init__(
        self,
        weights: Weights,
        num_tensors: int,
        runtime: Runtime,
        bucket_bytes: int,
        together: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings, and share nothing.

        Args:
            weights: Weights of all pipeline stages, on every rank.
            num_tensors: Number of these weights.
            runtime: Runtime of this rank.
            bucket_bytes: Size of a bucket.
            together: Tensors that must share a bucket with others; see `Buffer`.
        """
        # Unrelated processes can open the handles of this strategy.
        torch.multiprocessing.set_sharing_strategy("file_system")  # pyright: ignore[reportUnknownMemberType]
        self._weights, self._num_tensors, self._runtime = weights, num_tensors, runtime
        self._buffer = Buffer(bucket_bytes, is_shared=True, together=together)

    def send(self, fleet: Fleet, version: int) -> None:
        """See `Transport.send`."""
        num_left = self._num_tensors
        for bucket in self._buffer.fill(self._weights()):
            num_left -= len(bucket.names)
            handles = self._handles(bucket, sum(member.num_ranks for member in fleet.members))
            if self._runtime.is_main:
                fleet.tell(partial(_show, fleet.members, handles, version if not num_left else None))
            fleet.agree(self._runtime.all_gather(fleet.failures))  # and the next bucket may overwrite this one
        assert num_left == 0, "the number of sent tensors was announced"

    def _handles(self, bucket: Bucket, num_receivers: int) -> list[str]:
        """Return a handle per receiver, from the trainer rank on its device; each can be opened only once."""
        rank, size = self._runtime.rank, self._runtime.world_size
        own = {number: _pickle(bucket) for number in range(rank, num_receivers, size)}
        of_ranks = self._runtime.all_gather(own)
        return [of_ranks[number % size][number] for number in range(num_receivers)]

    def close(self) -> None:
        """Do nothing: a bucket's memory is freed with the transport."""


class DiskTransport:
    """Rank 0 writes a Hugging Face folder, and each server loads it; implements `Transport`.

    Servers load it like any checkpoint.
    """

    needs_begin = False

    def __init__(
        self, weights: Weights, runtime: Runtime, folder: Path, template: Path, bucket_bytes: int
    ) -> None:
        """Store the folder, and write nothing.

        Args:
            weights: Weights of all pipeline stages, on every rank.
            runtime: Runtime of this rank.
            folder: Folder of the versions, one at a time; trainer and servers see it under the same path.
            template: Hugging Face folder with config, tokenizer and the other files without weights.
            bucket_bytes: Size of one file, which is kept in memory until it is complete.
        """
        self._weights, self._runtime, self._folder = weights, runtime, folder
        self._template, self._bucket_bytes = template, bucket_bytes

    def send(self, fleet: Fleet, version: int) -> None:
        """See `Transport.send`."""
        stream, folder = self._weights(), self._folder / f"version_{version}"
        fault: Exception | None = None
        if self._runtime.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write_hf_checkpoint(stream, folder, self._template, self._bucket_bytes)
            except (OSError, SafetensorError, ConversionError) as error:  # the last: an old folder stayed
                fault = error
        for _ in stream:  # all ranks gather together, even if writing failed
            pass

        def load() -> None:
            if fault is not None:
                raise WeightSyncError(
                    f"{folder}: found that weights cannot be written ({fault}); expected enough free space "
                    "on the disk of run.folder. Free some space, or change rollout.sglang.weight_sync."
                ) from fault
            fleet.tell(lambda member: member.calls.from_disk(str(folder.absolute()), version))
            self._remove_versions()

        self._runtime.on_main(load)
        fleet.agree(self._runtime.all_gather(fleet.failures))

    def _remove_versions(self) -> None:
        """Remove the folders of this push and of earlier ones, failed ones too.

        Those that servers still map may stay on NFS.
        """
        left = list[str]()
        for folder in sorted([*self._folder.glob("version_*"), *self._folder.glob(".version_*")]):
            try:
                shutil.rmtree(folder)
            except OSError as error:
                left.append(f"{folder.name} ({error.strerror or error})")
        if left:
            logger.warning(
                "%s: %d folders of weights that servers have loaded cannot be removed, and the next push tries "
                "again: %s",
                self._folder,
                len(left),
                ", ".join(left[:3]),
            )

    def close(self) -> None:
        """Remove the files of a failed push."""
        if self._runtime.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)


def _show(members: Sequence[Member], handles: Sequence[str], version: int | None, member: Member) -> Call:
    """Return the call that sends each rank of a member its own handle."""
    first = sum(other.num_ranks for other in takewhile(lambda other: other != member, members))
    return member.calls.from_tensors(handles[first : first + member.num_ranks], version)


def _pickle(bucket: Bucket) -> str:
    """Return one handle of the bucket and its tensors' positions, pickled, in base64."""
    content = {"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": _places(bucket)}
    return base64.b64encode(ForkingPickler.dumps(content)).decode()


def _places(bucket: Bucket) -> list[SimpleNamespace]:
    """Return each tensor's position in bytes, with the fields of SGLang's `FlattenedTensorMetadata`.

    SGLang copies the fields into its own type; its unpickler refuses classes of other packages.
    """
    places: list[SimpleNamespace] = []
    start, item = 0, bucket.flat.element_size()
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = torch.Size(shape).numel() * item
        whole = {"name": name, "shape": torch.Size(shape), "dtype": bucket.flat.dtype}
        places.append(SimpleNamespace(**whole, start_idx=start, end_idx=start + size, numel=size))
        start += size
    return places
