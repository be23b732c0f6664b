"""Records the holders of this process's GPU memory, and refuses holders that must not be there together.

A colocated engine and the trainer take turns on the GPU:

1. The trainer is offloaded, and the memory that its allocator kept returns to the driver.
2. The engine's weights are loaded. The trainer's weights are sent to them, tensor by tensor, from the host.
3. The engine's cache is allocated, and responses are sampled.
4. The engine releases both, and the trainer is loaded.

Saving, evaluating, the comparison of log-probs after a push and the first start use the same order.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)

Holder = Literal["trainer", "engine weights", "engine cache"]
_NUM_KEPT = 1000  # entries; a rollout makes six


@dataclass(frozen=True)
class Entry:
    """One change: a holder that took or released memory."""

    holder: Holder
    is_there: bool
    free_bytes: int | None  # free on the device right afterwards, as its driver reports; None on a CPU


class GpuLedger:
    """Current holders of the GPU's memory, and the changes so far, oldest first.

    If trainer and engine take turns, an entry raises AssertionError if it would put the trainer and the
    engine's cache on the GPU together, or a cache without weights. This happens before memory runs out, and on
    CPUs too.
    """

    def __init__(self, give_back: Callable[[], None], free_bytes: Callable[[], int | None]) -> None:
        """Start without holders and without turns.

        Args:
            give_back: Function that returns the allocator's unused memory to the driver.
            free_bytes: Function that returns the driver's free bytes on the device; None on a CPU.
        """
        self._give_back, self._free_bytes = give_back, free_bytes
        self.takes_turns = False
        """Whether the engine is on the trainer's GPU, and the two take turns."""
        self._holders: set[Holder] = set()
        self.entries: deque[Entry] = deque(maxlen=_NUM_KEPT)

    def begin(self, *, takes_turns: bool) -> None:
        """Reset to no holders, before this run allocates any counted memory."""
        self.takes_turns = takes_turns
        self._holders.clear()
        self.entries.clear()

    def holds(self, holder: Holder) -> bool:
        """Whether this holder has its memory now."""
        return holder in self._holders

    def takes(self, holder: Holder) -> None:
        """Record that a holder takes its memory, before it allocates; do nothing if it already has it."""
        if self.holds(holder):
            return
        self._holders.add(holder)
        if self.takes_turns:
            there = ", ".join(sorted(self._holders))
            assert not {"trainer", "engine cache"} <= self._holders, f"together on one GPU: {there}"
            assert holder != "engine cache" or self.holds("engine weights"), f"a cache without weights: {there}"
        self._write(holder, is_there=True)

    def leaves(self, holder: Holder) -> None:
        """Record that a holder has freed its memory, and return it to the driver; do nothing if it had none."""
        if self.holds(holder):
            self._holders.discard(holder)
            self._give_back()
            self._write(holder, is_there=False)

    def _write(self, holder: Holder, *, is_there: bool) -> None:
        free = self._free_bytes()
        self.entries.append(Entry(holder, is_there, free))
        of_driver = "" if free is None else f"; {free / 2**30:.1f} GiB are free"
        logger.debug("GPU memory: %s %s%s", holder, "takes" if is_there else "leaves", of_driver)
