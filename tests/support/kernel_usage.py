"""Registers and spills of compiled kernels, as ptxas reports them, and the limits of the kernels' README."""

import re
from dataclasses import dataclass
from pathlib import Path

MAX_REGISTERS = 64
READING_MAX_REGISTERS = 40  # for kernels that read logits: three blocks of 512 threads, with their loads

_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>[^']+)' for 'sm_(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class KernelUsage:
    """Registers and spills of one kernel on one architecture, as reported by ptxas."""

    kernel: str  # mangled name
    architecture: str  # "90"
    registers: int  # per thread
    spilled_bytes: int  # stores and loads

    @property
    def keeps_the_promise(self) -> bool:
        """Whether the kernel uses no more registers than the README promises, and spills none."""
        most = MAX_REGISTERS if "combine" in self.kernel else READING_MAX_REGISTERS
        return self.registers <= most and not self.spilled_bytes


def kernel_usage(library: Path) -> tuple[KernelUsage, ...]:
    """Return one entry per kernel and architecture of a library built by `build_cuda_library`.

    Spills of functions that a kernel calls without inlining count as spills of the kernel.
    """
    report = library.with_suffix(".compiler.txt").read_text(encoding="utf-8")
    starts = list(_ENTRY.finditer(report))
    usages: list[KernelUsage] = []
    for start, end in zip(starts, [*(each.start() for each in starts[1:]), len(report)], strict=True):
        text = report[start.end() : end]
        spilled = sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(text))
        registers = max(map(int, _REGISTERS.findall(text)))
        usages.append(KernelUsage(start["kernel"], start["architecture"], registers, spilled))
    return tuple(usages)
