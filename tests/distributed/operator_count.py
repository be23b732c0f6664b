"""Counts the operators of a step, and which of them wait for the device; on a CPU, where nothing does."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# They return a number, or as many elements as values say: a host waits for a GPU that runs them.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
# They read a tensor's memory on a CPU, and copy it from a GPU first, without an operator of their own.
_READING = {"tolist", "numpy", "cpu"}
# A GPU adds in any order where an index comes twice.
_ACCUMULATING = {"scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_"}
_COUNTED = {"aten", "torch_attn"}
_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Sending tokens to experts: the host waits once for how many go where (`to_host` on a CPU).
_DISPATCH = ("token_dispatcher.py", "sort_chunks_by_idxs", "to_host")


@dataclass
class OperatorCount:
    """What a call ran: operators by name; waits, and sums in no fixed order, by where they come from."""

    operators: Counter[str] = field(default_factory=Counter[str])
    waits: Counter[str] = field(default_factory=Counter[str])
    unordered: Counter[str] = field(default_factory=Counter[str])

    def waits_outside_dispatch(self) -> dict[str, int]:
        """Waits that do not come from sending tokens to experts."""
        return {place: n for place, n in self.waits.items() if not any(each in place for each in _DISPATCH)}

    def __sub__(self, other: "OperatorCount") -> "OperatorCount":
        return OperatorCount(
            self.operators - other.operators, self.waits - other.waits, self.unordered - other.unordered
        )


def count_operators(step: Callable[[], Any]) -> OperatorCount:
    """Call `step`, and count what it ran, its backward passes included."""
    count = OperatorCount()
    with _Operators(count), _Reads(count):
        step()
    return count


class _Operators(TorchDispatchMode):
    """Counts operators that compute or copy: no views, and nothing that only allocates."""

    def __init__(self, count: OperatorCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in _COUNTED and not func.is_view and name not in _ALLOCATING:
            self._count.operators[name] += 1
            is_of_unknown_size = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
            has_mask = name.startswith("index") and any(map(_is_mask, args[1:2]))
            if name in _WAITING or has_mask or is_of_unknown_size:
                self._count.waits[f"{_place()}: {name}"] += 1
            if name in _ACCUMULATING and args[0].is_floating_point():
                self._count.unordered[f"{_place()}: {name} {args[0].dim()}d"] += 1
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts what Python reads of tensors without an operator."""

    def __init__(self, count: OperatorCount) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            self._count.waits[f"{_place()}: {name}"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(indices: Any) -> bool:
    given = indices if isinstance(indices, (list, tuple)) else [indices]
    return any(torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in given)


def _place() -> str:
    """The file and function of the package or of Megatron that called."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/megatron_dppo/" in name or "/megatron/core/" in name:
            return f"{name.rsplit('/', 1)[-1]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
