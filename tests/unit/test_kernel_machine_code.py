"""What the compiler made of the two kernels that touch the vocabulary, for sm_90: work and bytes in flight.

No time is measured. A budget leaves a Hopper GPU's memory to set the pace: while bfloat16 logits arrive at its
full speed, it can issue 13 instructions for each forward, and 26 backward.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dppo.kernels import build
from tests.support.kernel_usage import kernel_usage

VECTOR_BYTES = 16
THREADS = 512  # of a block with a long row
REGISTERS, MOST_THREADS = 65536, 2048  # of a multiprocessor


@dataclass(frozen=True)
class Budget:
    """What a kernel may take, by its name and template arguments, mangled."""

    kernel: str
    element_bytes: int
    instructions: float  # per logit in the main loop
    kib_in_flight: int = 96  # of a multiprocessor; 32 keep the memory of an H200 busy, by Little's law


BUDGETS = [
    Budget("row_statisticsI13__nv_bfloat16Lb1E", 2, 8.0),
    Budget("row_statisticsI13__nv_bfloat16Lb0E", 2, 6.5),
    Budget("row_statisticsIfLb1E", 4, 8.5),
    Budget("row_statisticsIfLb0E", 4, 7.0),
    Budget("logits_gradientI13__nv_bfloat16Lb1E", 2, 10.0, kib_in_flight=72),
    Budget("logits_gradientI13__nv_bfloat16Lb0E", 2, 7.5),
    Budget("logits_gradientIfLb1E", 4, 8.5),
    Budget("logits_gradientIfLb0E", 4, 6.5),
]
EACH = pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.kernel)
FEWEST_BLOCKS = 3


@dataclass(frozen=True)
class Loop:
    """Instructions from a loop's first to the branch back, which is the last."""

    body: tuple[str, ...]
    common: tuple[str, ...]  # without what a branch forward jumps over: that is rare

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes that pass by the first cache."""
        return sum(bool(re.search(r"LDG\.\S*NA\.128", instruction)) for instruction in self.common)

    @property
    def narrow_loads(self) -> int:
        return sum("LDG" in instruction and ".128" not in instruction for instruction in self.body)

    @property
    def loads_in_flight(self) -> int:
        """Wide loads before the first use of what one of them loaded."""
        loaded: set[str] = set()
        count = 0
        for instruction in self.common:
            wide = re.search(r"LDG\S*\.128 R(\d+),", instruction)
            sources = set(re.findall(r"\bR\d+\b", instruction.partition(",")[2]))
            if sources & loaded:
                break
            if wide:
                count += 1
                loaded |= {f"R{int(wide[1]) + i}" for i in range(4)}
        return count


@dataclass(frozen=True)
class MachineCode:
    """A cubin's disassembly, by kernel, and the compiler's report of it."""

    loops: dict[str, list[Loop]]
    registers: dict[str, int]

    def of(self, kernel: str) -> tuple[list[Loop], int]:
        """The loops of a kernel and its registers per thread."""
        (name,) = (name for name in self.loops if kernel in name)
        return self.loops[name], self.registers[name]

    def main_loop(self, kernel: str) -> Loop:
        """The only loop that streams vectors past the cache."""
        (loop,) = (loop for loop in self.of(kernel)[0] if loop.wide_loads)
        return loop


def _find_nvdisasm() -> Path:
    folders = [str(Path(os.environ["CUDA_HOME"]) / "bin")] if "CUDA_HOME" in os.environ else []
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        folders += [str(path) for path in Path(folder).glob("cu*/bin")]
    found = shutil.which("nvdisasm", path=os.pathsep.join([*folders, os.environ["PATH"]]))
    assert found, "found no nvdisasm: pip install nvidia-cuda-nvdisasm, as setup.py's dev extra does"
    return Path(found)


@pytest.fixture(scope="session")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> MachineCode:
    """Of the kernels for sm_90."""
    cubin = tmp_path_factory.mktemp("machine_code") / "kernels.cubin"
    options = ["-O3", "-std=c++17", "-Xptxas", "-v", "-cubin", "-arch=sm_90"]
    assert {"-O3", "-std=c++17"} <= set(build.NVCC_FLAGS)
    host = ["-ccbin", str(build.find_host_compiler())]
    command = [str(build.find_nvcc()), *host, *options, str(build.CSRC / "capi.cu"), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cubin.with_suffix(".compiler.txt").write_text(done.stdout + done.stderr)
    text = subprocess.run([_find_nvdisasm(), cubin], capture_output=True, text=True, check=True).stdout
    sections = re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]
    return MachineCode(
        loops={section.split()[0]: list(_loops(section)) for section in sections},
        registers={usage.kernel: usage.registers for usage in kernel_usage(cubin)},
    )


def _loops(section: str) -> Iterator[Loop]:
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in section.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
    targets = [re.search(r"\bBRA\b.*`\((\.L_\w+)\)", instruction) for instruction in instructions]
    for last, target in enumerate(targets):
        if target is None or target[1] not in labels or not (first := labels[target[1]]) < last:
            continue
        common, at = list[str](), first
        while at <= last:
            common.append(instructions[at])
            jump = targets[at]
            forward = labels.get(jump[1], 0) if jump and instructions[at].startswith("@") else 0
            at = forward if at < forward <= last else at + 1
        yield Loop(tuple(instructions[first : last + 1]), tuple(common))


@EACH
def test_instructions_per_logit(machine_code: MachineCode, budget: Budget) -> None:
    loop = machine_code.main_loop(budget.kernel)
    logits = loop.wide_loads * VECTOR_BYTES // budget.element_bytes
    assert sum("MUFU.EX2" in instruction for instruction in loop.common) == logits
    assert len(loop.common) / logits <= budget.instructions


@EACH
def test_bytes_in_flight(machine_code: MachineCode, budget: Budget) -> None:
    _, registers = machine_code.of(budget.kernel)
    per_thread = -(-registers // 8) * 8  # they are given out by eights
    blocks = min(REGISTERS // (per_thread * THREADS), MOST_THREADS // THREADS)
    assert blocks >= FEWEST_BLOCKS
    loads = machine_code.main_loop(budget.kernel).loads_in_flight
    assert blocks * THREADS * loads * VECTOR_BYTES >= budget.kib_in_flight * 1024


@EACH
def test_no_loop_loads_less_than_a_vector(machine_code: MachineCode, budget: Budget) -> None:
    """Single logits are loaded at the ends of a row only, whatever its width and alignment."""
    loops, _ = machine_code.of(budget.kernel)
    assert [loop.narrow_loads for loop in loops] == [0] * len(loops)
