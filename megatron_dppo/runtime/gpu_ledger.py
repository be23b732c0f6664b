"""Records who holds the memory of this process's GPU, and refuses what must not be there together.

An engine on the trainer's own GPU takes turns with it:

1. The trainer leaves, and what its allocator kept goes back to the driver.
2. The engine's weights come back; the trainer's are sent to them, tensor by tensor, from the host.
3. The engine's cache comes back, and responses are sampled.
4. The engine releases both, and the trainer comes back.

Saving, evaluating, the comparison of log-probs after a push and the first start keep to the same order.
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
    """One change: a holder that took memory or left it."""

    holder: Holder
    is_there: bool
    free_bytes: int | None  # of the device, as its driver says right afterwards; none on a CPU


class GpuLedger:
    """Holders of the GPU's memory now, and the changes that led there, oldest first.

    Where trainer and engine take turns, an entry that would put the trainer and the engine's cache there
    together, or a cache without weights, raises an AssertionError: before memory runs out, and on CPUs too.
    """

    def __init__(self, give_back: Callable[[], None], free_bytes: Callable[[], int | None]) -> None:
        """Begin with nobody there, and no turns.

        Args:
            give_back: Gives what this process's allocator keeps back to the driver.
            free_bytes: What the driver says is free on the device; none on a CPU.
        """
        self._give_back, self._free_bytes = give_back, free_bytes
        self.takes_turns = False
        """Whether the engine is on the trainer's GPU, and each leaves it to the other."""
        self._holders: set[Holder] = set()
        self.entries: deque[Entry] = deque(maxlen=_NUM_KEPT)

    def begin(self, *, takes_turns: bool) -> None:
        """Begin again with nobody there: nothing that counts has been allocated by this run."""
        self.takes_turns = takes_turns
        self._holders.clear()
        self.entries.clear()

    def holds(self, holder: Holder) -> bool:
        """Whether this holder has its memory now."""
        return holder in self._holders

    def takes(self, holder: Holder) -> None:
        """Record, before it allocates, that a holder takes its memory; nothing where it has it."""
        if self.holds(holder):
            return
        self._holders.add(holder)
        if self.takes_turns:
            there = ", ".join(sorted(self._holders))
            assert not {"trainer", "engine cache"} <= self._holders, f"together on one GPU: {there}"
            assert holder != "engine cache" or self.holds("engine weights"), f"a cache without weights: {there}"
        self._write(holder, is_there=True)

    def leaves(self, holder: Holder) -> None:
        """Record that a holder has freed its memory, and give it to others; nothing where it had none."""
        if self.holds(holder):
            self._holders.discard(holder)
            self._give_back()
            self._write(holder, is_there=False)

    def _write(self, holder: Holder, *, is_there: bool) -> None:
        free = self._free_bytes()
        self.entries.append(Entry(holder, is_there, free))
        of_driver = "" if free is None else f"; {free / 2**30:.1f} GiB are free"
        logger.debug("GPU memory: %s %s%s", holder, "takes" if is_there else "leaves", of_driver)
