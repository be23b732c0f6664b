"""Computes integers and booleans, and only shapes of floating-point tensors; counts memory and waits.

Routes, packing and the sizes of all-to-alls have values, as in a real step. Weights, activations and gradients
take no memory. A number that is read from a fake tensor is 1, and a condition is true. The experts that a
router chooses are spread evenly. Each rank of the simulated job has the same data as this one.

Device tensors have a mark (`on_device`) that results inherit. A wait is counted if the host of a GPU would
wait, and not if the host reads its own memory.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_dppo.runtime.process import Runtime

BUILD, FORWARD, LOSS, BACKWARD, STEP = PHASES = ("build", "forward", "loss", "backward", "step")
_PACKAGES = ("/megatron_dppo/", "/megatron/")
_PASSED_OVER = ("/megatron_dppo/mcore/cpu.py", "/pipeline_parallel/schedules.py")


_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")
_WITH_MASKS = ("index", "index_put", "index_put_", "_unsafe_index_put")


class Ledger:
    """Tracks the memory of each storage from its first tensor until it is freed.

    Attributes:
        phase: Phase that was set last.
        is_in_loss: Whether the loss runs.
        num_bytes: Live bytes.
        peaks: Most live bytes in each phase.
        waits: Waits of the host for the device, by phase and by operator with its source line.
    """

    def __init__(self) -> None:
        self.phase, self.is_in_loss = BUILD, False
        self.num_bytes = 0
        self.peaks: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._live: dict[int, tuple[Any, int]] = {}

    @property
    def moment(self) -> str:
        """Current phase: backward or loss if they run, and otherwise the last one that was set."""
        if self.is_in_loss:
            return LOSS
        is_backward = self.phase == FORWARD and torch._C._current_graph_task_id() != -1
        return BACKWARD if is_backward else self.phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase inside the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def add(self, tensor: Tensor) -> None:
        """Count the memory under a tensor, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _, key=key: self._forget(key)), size
            self.num_bytes += size

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of the model again after its memory was freed or restored."""
        known = self._live.get(storage._cdata)
        if known is not None:
            self._live[storage._cdata] = known[0], storage.nbytes()
            self.num_bytes += storage.nbytes() - known[1]

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._live.pop(key)[1]

    def close_operator(self) -> None:
        """Update the peak of the current phase."""
        moment = self.moment
        self.peaks[moment] = max(self.peaks[moment], self.num_bytes)

    def wait(self, name: str) -> None:
        """Count a wait of the host for the device."""
        self.waits[self.moment, f"{name} {source_line()}"] += 1


def source_line() -> str:
    """Return file and line of the caller in the package or in Megatron; without one, autograd's node."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        package = next((package for package in _PACKAGES if package in name), None)
        if package is not None and not any(other in name for other in _PASSED_OVER):
            return f"{name.rsplit(package, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    return "elsewhere" if node is None else f"autograd: {node.name()}"


class PretendedWorld:
    """Computes collectives on integers as if all ranks had equal data; ignores floating-point tensors."""

    def __init__(self, rank: int, size: int, sent_shape: tuple[int, ...]) -> None:
        """Start the process group.

        Args:
            rank: Rank of this process.
            size: Number of ranks.
            sent_shape: Shape of the tensor that a pipeline stage sends to the next or previous one.
        """
        self._sent_shape, self._operation = sent_shape, dist.ReduceOp.SUM
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        self.runtime = Runtime(torch.device("cpu"), rank, size)
        self._replace_functions()

    def _replace_functions(self) -> None:
        """Replace functions that use no operator, or pass too little information to the operator."""
        distributed: Any = dist
        all_reduce, new_group = dist.all_reduce, dist.new_group

        def reduce_all(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self._operation = op
            return all_reduce(tensor, op, *args, **kwargs)

        def gather(gathered: list[Any], own: Any, group: Any = None) -> None:
            gathered[:] = [own] * len(gathered)

        distributed.all_reduce, distributed.all_gather_object = reduce_all, gather
        distributed.new_group = lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})

    def run(self, name: str, func: Any, args: Any) -> Any:
        """Run an operator of c10d, as already completed."""
        tensors = [x for x in tree_iter(args) if isinstance(x, Tensor)]
        if not any(isinstance(x, FakeTensor) for x in tensors):
            groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
            size = ProcessGroup.unbox(groups[0]).size() if groups else 1
            if name == "allreduce_" and self._operation == dist.ReduceOp.SUM:
                args[0][0].mul_(size)
            elif name in ("_allgather_base_", "alltoall_base_"):
                args[0].view(-1, args[1].numel()).copy_(args[1].flatten())
            elif name == "recv_":
                args[0][0].copy_(torch.tensor(self._sent_shape))
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work


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
        self._ledger.close_operator()
        return result

    def _count_wait(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        is_of_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        has_mask = name in _WITH_MASKS and any(map(_is_mask, args[1]))
        if (name in _WAITING or is_of_unknown_size or has_mask) and any(map(is_on_device, tensors)):
            self._ledger.wait(name)

    def _run(self, name: str, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if not tensors and func._schema.returns:
            return self._make(name, func, args, kwargs)
        if name == "empty_like" and args[0].is_floating_point():
            return self._run_fake(func, args, kwargs)
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
            return self._run_fake(torch.ops.aten.empty.memory_format, ([num],), {"dtype": first.dtype})
        if name in _WITH_MASKS:
            args = (first, [place for index in args[1] for place in _places(index)], *args[2:])
        if name in _LIKE and not (dtype := kwargs.get("dtype") or first.dtype).is_floating_point:
            shape = first.shape if name.endswith("_like") else args[1]
            return torch.full(shape, args[-1] if "full" in name else int("ones" in name), dtype=dtype)
        if name == "_to_copy" and hasattr(first, "is_zeros") and not _is_float(kwargs):
            return torch.zeros(first.shape, dtype=kwargs["dtype"])  # how Megatron begins its routing map
        self._refuse_unknown(name, func, args)
        result = self._run_fake(func, args, kwargs)
        if name == "topk" and first.dim() == 2:
            num, k, size = first.shape[0], args[1], first.shape[1]
            return result[0], (torch.arange(num * k) % size).view(num, k)
        if name == "zeros_like":
            result.is_zeros = True
        return result

    def _make(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a factory."""
        is_float = name not in ("arange", "full") or any(isinstance(x, float) for x in args)
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if is_float else torch.int64)
        return self._run_fake(func, args, kwargs) if dtype.is_floating_point else func(*args, **kwargs)

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _refuse_unknown(self, name: str, func: Any, args: Any) -> None:
        pairs = zip(args, func._schema.arguments, strict=False)
        written = [value for value, a in pairs if a.alias_info is not None and a.alias_info.is_write]
        for value in tree_iter(written):
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                raise AssertionError(f"{source_line()}: {name} writes unknown values to {value.dtype}")


def _is_float(kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is None or dtype.is_floating_point


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _places(index: Any) -> Any:
    if not _is_mask(index):
        return [index]
    return (torch.ones(index.shape) if isinstance(index, FakeTensor) else index).nonzero().unbind(1)
