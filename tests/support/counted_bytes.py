"""Counts the work of copying and computing on tensors, without a clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass
class TensorWork:
    """What a call did."""

    operators: int = 0  # views left out
    num_bytes: int = 0  # of the tensors that they made


def tensor_work(call: Callable[[], Any]) -> TensorWork:
    """Call it, and count its operators and the bytes that they made."""
    work = TensorWork()
    with _Counting(work):
        call()
    return work


class _Counting(TorchDispatchMode):
    def __init__(self, work: TensorWork) -> None:
        super().__init__()
        self._work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._work.operators += 1
            if not func._schema.is_mutable:
                self._work.num_bytes += sum(each.nbytes for each in tree_iter(made) if torch.is_tensor(each))
        return made
