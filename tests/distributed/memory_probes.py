"""What PyTorch really holds: bytes saved for backward, and bytes of all live tensors."""

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class SavedBytes:
    """Most bytes of distinct storages that autograd kept for backward at one time, parameters left out."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.peak = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._uses: Counter[int] = Counter()
        self._live = 0

    def watching(self) -> AbstractContextManager[Any]:
        """Count inside this block."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> "_Saved":
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        # A saved tensor with its graph would keep that graph alive when nothing else does.
        saved = _Saved(tensor.detach().requires_grad_(tensor.requires_grad))
        if size and key not in self._parameters:
            self._count(key, size, 1)
            weakref.finalize(saved, self._count, key, size, -1)
        return saved

    def _count(self, key: int, size: int, change: int) -> None:
        was_saved = self._uses[key] > 0
        self._uses[key] += change
        self._live += size * ((self._uses[key] > 0) - was_saved)
        self.peak = max(self.peak, self._live)


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class LiveBytes(TorchDispatchMode):
    """Most bytes of storages alive at one time, of those that operations touched inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, result)):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        if self._live > self.peak:
            for key in [key for key, (reference, _) in self._seen.items() if reference.expired()]:
                self._live -= self._seen.pop(key)[1]
            self.peak = max(self.peak, self._live)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        reference, known = self._seen.get(key, (None, 0))
        if not size or (reference is not None and not reference.expired()):
            return
        self._seen[key] = StorageWeakRef(storage), size
        self._live += size - known
