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

RESERVE_BYTES = 2 * 2**30
"""Bytes of CUDA context, NCCL buffers and library workspaces of one trainer process; an assumption."""
ENGINE_RESIDUE_BYTES = 5 * 2**30
"""Bytes that a colocated server's process keeps while its weights and cache are released; an assumption.

SGLang releases neither its CUDA graphs nor their buffers. In GiB, for Qwen3-30B-A3B with SGLang's defaults on
GPUs of 80 GB: 0.5 of CUDA context and kernels; 0.7 of NCCL and the buffers of SGLang's all-reduce; 0.4 of the
attention's workspace; 1.0 of decode graphs up to 512 requests (float32 logits of 151936 tokens take 0.3, three
times); 1.4 of prefill graphs up to 8192 tokens (outputs of 8 experts 0.25, their inner rows 0.2, attention and
residuals 0.25, twice); 0.4 of the nodes of about 90 graphs of 48 layers; 0.6 of fragments.
`GpuLedger.outside_bytes` measures this and RESERVE_BYTES together.
"""
OUTSIDE = "memory/outside_bytes"  # metric of it
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

    def __init__(
        self,
        give_back: Callable[[], None],
        free_bytes: Callable[[], int | None],
        outside_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Start without holders and without turns.

        Args:
            give_back: Function that returns the allocator's unused memory to the driver.
            free_bytes: Function that returns the driver's free bytes on the device; None on a CPU.
            outside_bytes: Function that returns the bytes on the device that are neither free nor in this
                process's allocator; None on a CPU.
        """
        self._give_back, self._free_bytes, self._find_outside = give_back, free_bytes, outside_bytes
        self.takes_turns = False
        """Whether the engine is on the trainer's GPU, and the two take turns."""
        self._holders: set[Holder] = set()
        self.entries: deque[Entry] = deque(maxlen=_NUM_KEPT)
        self.outside_bytes: int | None = None
        """Most bytes outside of this process's allocator while neither trainer nor engine held memory.

        Both processes keep them in every turn. None before their first change of turns, and on a CPU.
        """

    def begin(self, *, takes_turns: bool) -> None:
        """Reset to no holders, before this run allocates any counted memory."""
        self.takes_turns = takes_turns
        self._holders.clear()
        self.entries.clear()
        self.outside_bytes = None

    def holds(self, holder: Holder) -> bool:
        """Whether this holder has its memory now."""
        return holder in self._holders

    def acquire(self, holder: Holder) -> None:
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
            if self.takes_turns and not self._holders:
                self._measure_outside()

    def _write(self, holder: Holder, *, is_there: bool) -> None:
        free = self._free_bytes()
        self.entries.append(Entry(holder, is_there, free))
        of_driver = "" if free is None else f"; {free / 2**30:.1f} GiB are free"
        logger.debug("GPU memory: %s %s%s", holder, "takes" if is_there else "leaves", of_driver)

    def _measure_outside(self) -> None:
        """Keep the most bytes outside of the allocator, and warn once if they are more than a plan assumes."""
        found, before = self._find_outside(), self.outside_bytes or 0
        if found is None:
            return
        self.outside_bytes = max(found, before)
        assumed = RESERVE_BYTES + ENGINE_RESIDUE_BYTES
        if found > assumed >= before:
            logger.warning(
                "found %.1f GiB of the GPU in use while trainer and engine have released their memory; "
                "expected at most the %.1f that megatron-dppo plan assumes. Plan again with --measured and "
                "this run's folder. A server keeps less with a smaller sglang.cuda_graph_max_bs_decode or "
                "cuda_graph_max_bs_prefill, or with sglang.disable_prefill_cuda_graph. A smaller "
                "sglang.mem_fraction_static leaves more free in a rollout.",
                found / 2**30,
                assumed / 2**30,
            )
