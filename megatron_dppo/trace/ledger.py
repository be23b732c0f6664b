"""Counts memory, launches and waits of a traced step, by phase and by source line."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BUILD, FORWARD, LOSS, BACKWARD, STEP = PHASES = ("build", "forward", "loss", "backward", "step")
_SMALL = 1 << 20  # bytes of a tensor whose source line is not looked up
_ROOMS = ("/megatron_dppo/", "/megatron/")
_PASSED_OVER = ("/megatron_dppo/trace/", "/megatron_dppo/mcore/cpu.py", "/pipeline_parallel/schedules.py")


@dataclass(frozen=True)
class Count:
    """Operators of a step, by phase or by (phase, operator and source line)."""

    launches: Counter[str] = field(default_factory=Counter[str])  # operators that compute or copy
    collectives: Counter[str] = field(default_factory=Counter[str])
    waits: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def __sub__(self, other: "Count") -> "Count":
        launches, collectives, waits = Counter(self.launches), Counter(self.collectives), Counter(self.waits)
        launches.subtract(other.launches)
        collectives.subtract(other.collectives)
        waits.subtract(other.waits)
        return Count(launches, collectives, waits)


@dataclass(frozen=True)
class Peak:
    """Most live bytes in a phase, by owner."""

    num_bytes: int = 0
    by_line: Counter[str] = field(default_factory=Counter[str])


class Ledger:
    """Tracks the memory of each storage from its first tensor until it is freed."""

    def __init__(self, announce: Callable[[str, int], None]) -> None:
        """Start in the build phase.

        Args:
            announce: Callback with the phase and the live bytes, after every operator.
        """
        self.phase, self.is_in_loss = BUILD, False
        self.num_bytes = 0
        self.by_line: Counter[str] = Counter()
        self.peaks: dict[str, Peak] = {}
        self.count = Count()
        self._announce = announce
        self._live: dict[int, tuple[Any, int, str]] = {}

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
        if not size or key in self._live:
            return
        line = source_line() if size >= _SMALL else "tensors below 1 MiB"
        gone = weakref.ref(storage, lambda _, key=key: self._forget(key))
        self._live[key] = gone, size, line
        self._change(line, size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage of the model again after its memory was freed or restored."""
        known = self._live.get(storage._cdata)
        if known is not None:
            reference, size, line = known
            self._live[storage._cdata] = reference, storage.nbytes(), line
            self._change(line, storage.nbytes() - size)

    def _forget(self, key: int) -> None:
        _, size, line = self._live.pop(key)
        self._change(line, -size)

    def _change(self, line: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.by_line[line] += num_bytes

    def close_operator(self, *, is_launch: bool) -> None:
        """Update the peak after an operator, and count the operator if it computes or copies."""
        moment = self.moment
        peak = self.peaks.get(moment)
        if peak is None or self.num_bytes > peak.num_bytes:
            self.peaks[moment] = Peak(self.num_bytes, Counter(self.by_line))
        self.count.launches[moment] += is_launch
        self._announce(moment, self.num_bytes)

    def wait(self, name: str) -> None:
        """Count a wait of the host for the device."""
        self.count.waits[self.moment, f"{name} {source_line()}"] += 1

    def collective(self, name: str) -> None:
        """Count a collective."""
        self.count.collectives[f"{self.moment} {name}"] += 1


def source_line() -> str:
    """Return file and line of the caller in the package or in Megatron; without one, autograd's node."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        room = next((room for room in _ROOMS if room in name), None)
        if room is not None and not any(other in name for other in _PASSED_OVER):
            return f"{name.rsplit(room, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    return "elsewhere" if node is None else f"autograd: {node.name()}"
