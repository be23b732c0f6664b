"""Shares weights by handle: servers on the trainer's devices map its memory, with one handle per bucket."""

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch.multiprocessing

from megatron_dppo.engines.sglang.update_calls import Call
from megatron_dppo.engines.weight_sync.base import Weights
from megatron_dppo.engines.weight_sync.buckets import Bucket, Buffer
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.runtime.process import Runtime


class TensorTransport:
    """Sends server ranks handles to the buckets of the trainer ranks on their devices; a `base.Transport`.

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
            together: Tensors that must share a bucket with others; see `buckets.Buffer`.
        """
        torch.multiprocessing.set_sharing_strategy("file_system")  # unrelated processes can open its handles
        self._weights, self._num_tensors, self._runtime = weights, num_tensors, runtime
        self._buffer = Buffer(bucket_bytes, is_shared=True, together=together)

    def send(self, fleet: Fleet, version: int) -> None:
        """See `Transport.send`."""
        num_left = self._num_tensors
        for bucket in self._buffer.fill(self._weights()):
            num_left -= len(bucket.names)
            handles = self._handles(bucket, sum(member.num_ranks for member in fleet.members))
            if self._runtime.is_main:
                fleet.tell(partial(_showing, fleet.members, handles, version if not num_left else None))
            fleet.agree(self._runtime.all_gather(fleet.failures))  # and the next bucket may overwrite this one
        assert num_left == 0, "the number of sent tensors was announced"

    def _handles(self, bucket: Bucket, num_receivers: int) -> list[str]:
        """Return a handle per receiver, from the trainer rank on its device; each can be opened only once."""
        rank, size = self._runtime.rank, self._runtime.world_size
        own = {number: _pickled(bucket) for number in range(rank, num_receivers, size)}
        of_ranks = self._runtime.all_gather(own)
        return [of_ranks[number % size][number] for number in range(num_receivers)]

    def close(self) -> None:
        """Do nothing: a bucket's memory is freed with the transport."""


def _showing(members: Sequence[Member], handles: Sequence[str], version: int | None, member: Member) -> Call:
    """Return the call that sends each rank of a member its own handle."""
    first = sum(other.num_ranks for other in takewhile(lambda other: other != member, members))
    return member.calls.from_tensors(handles[first : first + member.num_ranks], version)


def _pickled(bucket: Bucket) -> str:
    """Return one handle of the bucket and the positions of its tensors, pickled, in base64."""
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
