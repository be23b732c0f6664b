"""Collectives of a simulated job: each rank has the same data as this one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

from megatron_dppo.runtime.process import Runtime


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
