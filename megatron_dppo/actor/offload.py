"""Offloads trainer memory to the host: optimizer states between updates, all of it while sampling.

Tensors keep their identity, views and all: the memory under them goes to the host and comes back, bit for bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Residence:
    """Memory of some tensors: on the device, or on the host, page-locked where that helps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[int, Tensor] = {}  # kept from one departure to the next
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def num_bytes_away(self) -> int:
        """Number of bytes that are not on the device now."""
        return sum(num_bytes for _, num_bytes, _ in self._away)

    def leave(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Free the device memory under these tensors until `come_back`.

        Args:
            kept: Their contents come back.
            dropped: Come back as zeros.
        """
        for storage in _storages(kept):
            bytes_on_device = _bytes_of(storage, self._device)
            host = self._host.get(storage._cdata)
            if host is None or host.numel() != storage.nbytes():
                is_locked = self._device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_locked)
                self._host[storage._cdata] = host
            host.copy_(bytes_on_device)
            self._away.append((storage, storage.nbytes(), host))
        for storage in _storages(dropped):
            self._away.append((storage, storage.nbytes(), None))
        for storage, _, _ in self._away:
            storage.resize_(0)

    def come_back(self) -> None:
        """Move everything back to the device."""
        for storage, num_bytes, host in self._away:
            storage.resize_(num_bytes)
            bytes_on_device = _bytes_of(storage, self._device)
            if host is None:
                bytes_on_device.zero_()
            else:
                bytes_on_device.copy_(host)
        self._away.clear()


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
        self, chunks: Sequence[torch.nn.Module], optimizer: Any, device: torch.device, *, is_offloading: bool
    ) -> None:
        """Begin with everything on the device.

        Args:
            chunks: This rank's part of the model, with `main_grad` on parameters that learn.
            optimizer: Megatron's.
            device: This process's.
            is_offloading: Keep optimizer states in the host's memory outside of `states_here`.
        """
        self._parameters: list[Any] = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._optimizer, self.is_offloading = optimizer, is_offloading
        self._states, self._all = Residence(device), Residence(device)

    @contextmanager
    def states_here(self) -> Iterator[None]:
        """Keep the optimizer's states on the device inside the block."""
        self._states.come_back()
        try:
            yield
        finally:
            if self.is_offloading:
                self._states.leave(self._optimizer_states())

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the trainer's device memory inside the block; gradients come back as zeros."""
        gradients = [p.main_grad for p in self._parameters if p.requires_grad]
        self._all.leave([*self._parameters, *self._optimizer_states()], dropped=gradients)
        try:
            yield
        finally:
            self._all.come_back()

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
