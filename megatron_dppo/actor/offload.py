"""Moves trainer memory to the host: optimizer states between updates, all of it while an engine samples.

Tensors keep their identity, views and all: the memory under them goes to the host and comes back, bit for bit.
"""

# PyTorch has no public name for the identity of a storage, which is `_cdata`.
# pyright: reportPrivateUsage=false
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.runtime.gpu_ledger import GpuLedger

PIECE_BYTES = 2**28
"""Bytes of one host allocation: PyTorch rounds page-locked memory up to a power of two, 22 GiB to 32 GiB."""


class Residence:
    """Memory of some tensors: on the device, or on the host, page-locked if the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[int, list[Tensor]] = {}  # pieces of each storage, kept from one departure to the next
        self._away: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}  # bytes, and whether they come back

    @property
    def num_bytes_away(self) -> int:
        """Number of bytes that are not on the device now."""
        return sum(num_bytes for _, num_bytes, _ in self._away.values())

    def leave(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Free the device memory of these tensors until `reload`.

        Args:
            kept: Their contents come back.
            dropped: Come back as zeros.
        """
        for storage in _storages(kept):
            for piece, part in zip(
                self._pieces(storage), torch.split(_bytes_of(storage, self._device), PIECE_BYTES), strict=True
            ):
                piece.copy_(part)
            self._away[storage._cdata] = (storage, storage.nbytes(), True)
        for storage in _storages(dropped):
            self._away.setdefault(storage._cdata, (storage, storage.nbytes(), False))
        for storage, _, _ in self._away.values():
            storage.resize_(0)

    def reload(self) -> None:
        """Move everything back to the device."""
        for key, (storage, num_bytes, is_kept) in self._away.items():
            storage.resize_(num_bytes)
            bytes_on_device = _bytes_of(storage, self._device)
            if is_kept:
                for piece, part in zip(self._host[key], torch.split(bytes_on_device, PIECE_BYTES), strict=True):
                    part.copy_(piece, non_blocking=True)
            else:
                bytes_on_device.zero_()
        self._away.clear()

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values on the device: itself, or a copy of those that are on the host.

        Args:
            tensor: Contiguous.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self._away:
            return tensor
        assert self._away[key][2] and tensor.is_contiguous(), "only what was kept can be read"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        start, at = int(tensor.storage_offset()) * tensor.element_size(), 0
        target = copy.view(-1).view(torch.uint8)
        while at < target.numel():
            index, within = divmod(start + at, PIECE_BYTES)
            part = self._host[key][index][within : within + target.numel() - at]
            target[at : at + part.numel()].copy_(part, non_blocking=True)
            at += part.numel()
        return copy

    def _pieces(self, storage: torch.UntypedStorage) -> list[Tensor]:
        """Return the host's memory for a storage, [n] uint8 each."""
        pieces = self._host.get(storage._cdata, [])
        if sum(piece.numel() for piece in pieces) != storage.nbytes():
            sizes = [min(PIECE_BYTES, storage.nbytes() - at) for at in range(0, storage.nbytes(), PIECE_BYTES)]
            is_locked = self._device.type == "cuda"
            pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=is_locked) for size in sizes]
            self._host[storage._cdata] = pieces
        return pieces


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors, each once, without those that were freed."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]


class TrainerMemory:
    """Moves a trainer's parameters, gradients and optimizer states between device and host."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        device: torch.device,
        *,
        is_offloading: bool,
        ledger: GpuLedger,
    ) -> None:
        """Begin with everything on the device.

        Args:
            chunks: This rank's part of the model, with `main_grad` on parameters that learn.
            optimizer: Megatron's.
            device: This process's.
            is_offloading: Keep optimizer states in the host's memory outside of `states_here`.
            ledger: Notified on offload and onload.
        """
        self._parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._optimizer, self.is_offloading = optimizer, is_offloading
        self._states, self._all = Residence(device), Residence(device)
        self._ledger = ledger
        if is_offloading:  # the float32 master weights: the first forward pass comes before the first update
            self._states.leave(self._optimizer_states())

    @contextmanager
    def states_here(self) -> Generator[None]:
        """Keep the optimizer's states on the device inside the block."""
        self._states.reload()
        try:
            yield
        finally:
            if self.is_offloading:
                self._states.leave(self._optimizer_states())

    def leave(self) -> None:
        """Free the trainer's device memory until `reload`, which restores gradients as zeros.

        The cached memory of PyTorch's allocator goes back to the driver, for other processes.
        """
        gradients = [p.main_grad for p in self._parameters if p.requires_grad]
        self._all.leave([*self._parameters, *self._optimizer_states()], dropped=gradients)
        self._ledger.leaves("trainer")

    def reload(self) -> None:
        """Move the trainer's memory back to the device, unless it is there already."""
        self._ledger.acquire("trainer")
        self._all.reload()

    @property
    def is_away(self) -> bool:
        """Whether the trainer has left the device."""
        return not self._ledger.holds("trainer")

    def read(self, parameter: Tensor) -> Tensor:
        """Return a parameter's values on the device: itself, or a copy if the trainer is offloaded."""
        return self._all.read(parameter)

    @property
    def num_bytes_away(self) -> int:
        """Number of bytes in the host's memory, or dropped, now."""
        return self._states.num_bytes_away + self._all.num_bytes_away

    def _optimizer_states(self) -> Iterator[Tensor]:
        """Yield moments and float32 master weights that share no memory with parameters."""
        own = {parameter.untyped_storage()._cdata for parameter in self._parameters}
        for member in self._optimizer.chained_optimizers:
            inner = member.optimizer
            masters = [parameter for group in inner.param_groups for parameter in group["params"]]
            states = [value for state in inner.state.values() for value in state.values()]
            for tensor in (*masters, *states):
                if torch.is_tensor(tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in own:
                    yield tensor
