"""Compiles the CUDA kernels for the present GPU, and checks registers and spills against the kernels' README.

    python -m tools.gpu_machine.kernel_build

Without a GPU, the kernels are compiled for sm_90. The exit status is 1 if a kernel spills registers, or uses
more registers than allowed (MAX_REGISTERS, READING_MAX_REGISTERS).
"""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dppo.errors import KernelBuildError
from megatron_dppo.kernels.build import cuda_library

MAX_REGISTERS = 64
READING_MAX_REGISTERS = 40  # for kernels that read logits: three blocks of 512 threads, with their loads

_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>[^']+)' for 'sm_(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")


@dataclass(frozen=True)
class KernelUsage:
    """Registers and spills of one kernel on one architecture, as reported by ptxas."""

    kernel: str  # mangled name
    architecture: str  # "90"
    registers: int  # per thread
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def max_registers(self) -> int:
        """Maximum number of registers that the README promises."""
        return MAX_REGISTERS if "combine" in self.kernel else READING_MAX_REGISTERS

    @property
    def keeps_the_promise(self) -> bool:
        """Whether the kernel uses no more registers than promised, and spills none."""
        return self.registers <= self.max_registers and not self.spill_store_bytes + self.spill_load_bytes


def kernel_usage(library: Path) -> tuple[KernelUsage, ...]:
    """Return one entry per kernel and architecture of a library built by `build_cuda_library`.

    Spills of functions that a kernel calls without inlining count as spills of the kernel.
    """
    report = library.with_suffix(".compiler.txt").read_text(encoding="utf-8")
    starts = list(_ENTRY.finditer(report))
    ends = [start.start() for start in starts[1:]] + [len(report)]
    usages: list[KernelUsage] = []
    for start, end in zip(starts, ends, strict=True):
        text = report[start.end() : end]
        spills = list(_SPILLS.finditer(text))
        usages.append(
            KernelUsage(
                kernel=start["kernel"],
                architecture=start["architecture"],
                registers=max(int(used["registers"]) for used in _REGISTERS.finditer(text)),
                spill_store_bytes=sum(int(spill["stores"]) for spill in spills),
                spill_load_bytes=sum(int(spill["loads"]) for spill in spills),
            )
        )
    return tuple(usages)


def main() -> int:
    """Compile the kernels, and print one line per kernel and a summary line."""
    started = time.perf_counter()
    try:
        library = cuda_library(None if torch.cuda.is_available() else ("90",))
    except KernelBuildError as error:
        print(f"KernelBuildError: {error}")
        return 1
    print(f"library {library}, after {time.perf_counter() - started:.1f} s")
    usages = kernel_usage(library)
    for usage in usages:
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        registers = f"{usage.registers:3} registers, {spilled} bytes spilled"
        print(f"usage sm_{usage.architecture}: {registers}, {usage.kernel[:60]}")
    most = max((usage.registers for usage in usages), default=0)
    num_spilling = sum(bool(usage.spill_store_bytes + usage.spill_load_bytes) for usage in usages)
    print(f"kernels: {len(usages)}, at most {most} registers of {MAX_REGISTERS}, {num_spilling} spill")
    return 0 if usages and all(usage.keeps_the_promise for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
