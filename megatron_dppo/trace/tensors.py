"""Computes integers and booleans, and only the shapes of floating-point tensors.

Routes, packing and the sizes of all-to-alls have values, as in a real step. Weights, activations and gradients
take no memory. A number that is read from a fake tensor is 1, and a condition is true. The experts that a
router chooses are spread evenly.

Device tensors have a mark (`on_device`) that results inherit. A wait is counted if the host of a GPU would
wait, and not if the host reads its own memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_dppo.errors import TraceError
from megatron_dppo.trace.collectives import PretendedWorld
from megatron_dppo.trace.ledger import Ledger, source_line

_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
_ALLOCATING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_WITH_MASKS = ("index", "index_put", "index_put_", "_unsafe_index_put")


def on_device(tensor: Tensor) -> Tensor:
    """Mark a real tensor as a device tensor."""
    setattr(tensor, "is_on_device", True)  # noqa: B010 - an attribute of our own
    return tensor


def is_on_device(value: Any) -> bool:
    """Return whether it is a device tensor."""
    return isinstance(value, FakeTensor) or getattr(value, "is_on_device", False)


class FakeFloats(TorchDispatchMode):
    """Runs every operator inside the block as described above, and records it in the ledger."""

    def __init__(self, ledger: Ledger, world: PretendedWorld) -> None:
        super().__init__()
        self._ledger, self._world = ledger, world
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            self._ledger.collective(name)
            result = self._world.run(name, func, args)
        else:
            self._count_wait(name, tensors, args, kwargs)
            result = self._run(name, func, tensors, args, kwargs)
        has_device = any(map(is_on_device, tensors))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                if has_device and not isinstance(value, FakeTensor):
                    on_device(value)
                if is_on_device(value):
                    has_device = True
                    self._ledger.add(value)
        is_launch = has_device and func.namespace not in ("c10d", "prim") and name not in _ALLOCATING
        self._ledger.close_operator(is_launch=is_launch and not func.is_view)
        return result

    def _count_wait(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        is_of_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        has_mask = name in _WITH_MASKS and any(map(_is_mask, args[1]))
        if (name in _WAITING or is_of_unknown_size or has_mask) and any(map(is_on_device, tensors)):
            self._ledger.wait(name)

    def _run(self, name: str, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if not tensors and func._schema.returns:
            return self._made(name, func, args, kwargs)
        if name == "empty_like" and args[0].is_floating_point():
            return self._faked(func, args, kwargs)
        if not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        first = args[0]
        if name == "_local_scalar_dense":
            return True if first.dtype == torch.bool else 1.0 if first.is_floating_point() else 1
        if name == "equal":
            return True
        if name == "nonzero":
            return on_device(torch.ones(first.shape, dtype=torch.bool).nonzero())
        if name == "bincount":
            return torch.zeros(kwargs.get("minlength", args[-1]), dtype=torch.int64)
        if name == "masked_select":
            is_known = not isinstance(args[1], FakeTensor)
            num = int(args[1].expand(first.shape).sum()) if is_known else first.numel()
            return self._faked(torch.ops.aten.empty.memory_format, ([num],), {"dtype": first.dtype})
        if name in _WITH_MASKS:
            args = (first, [place for index in args[1] for place in _places(index)], *args[2:])
        if name in _LIKE and not (dtype := kwargs.get("dtype") or first.dtype).is_floating_point:
            shape = first.shape if name.endswith("_like") else args[1]
            return torch.full(shape, args[-1] if "full" in name else int("ones" in name), dtype=dtype)
        if name == "_to_copy" and hasattr(first, "is_zeros") and not _is_float(kwargs):
            return torch.zeros(first.shape, dtype=kwargs["dtype"])  # how Megatron begins its routing map
        self._refuse_unknown(name, func, args)
        result = self._faked(func, args, kwargs)
        if name == "topk" and first.dim() == 2:
            num, k, size = first.shape[0], args[1], first.shape[1]
            return result[0], (torch.arange(num * k) % size).view(num, k)
        if name == "zeros_like":
            result.is_zeros = True
        return result

    def _made(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a factory."""
        is_float = name not in ("arange", "full") or any(isinstance(x, float) for x in args)
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if is_float else torch.int64)
        return self._faked(func, args, kwargs) if dtype.is_floating_point else func(*args, **kwargs)

    def _faked(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _refuse_unknown(self, name: str, func: Any, args: Any) -> None:
        pairs = zip(args, func._schema.arguments, strict=False)
        written = [value for value, a in pairs if a.alias_info is not None and a.alias_info.is_write]
        for value in tree_iter(written):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                raise TraceError(
                    f"{source_line()}: {name} writes values that a trace does not compute to {value.dtype}. "
                    "Trace a config that does not run this code."
                )


def _is_float(kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is None or dtype.is_floating_point


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _places(index: Any) -> Any:
    if not _is_mask(index):
        return [index]
    return (torch.ones(index.shape) if isinstance(index, FakeTensor) else index).nonzero().unbind(1)
