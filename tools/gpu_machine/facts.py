"""Prints facts about the machine: versions, programs, devices and measured ceilings.

    python -m tools.gpu_machine.facts

The ceilings are the bytes per second of a copy on the device, and the floating-point operations per second of
one matrix product in each type, all on random data. Compare the figures of the other steps with them.
"""

import importlib.metadata
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable

import torch

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "numpy", "transformer-engine", "sglang")
PROGRAMS = ("nvidia-smi", "nvcc", "g++", "compute-sanitizer")
REPEATS = 12


def main() -> None:
    """Print all facts."""
    print(f"python {platform.python_version()}, kernel {platform.release()}, {os.cpu_count()} cores")
    print("versions: " + ", ".join(f"{name} {version_of(name)}" for name in PACKAGES))
    print("programs: " + ", ".join(f"{name} {shutil.which(name) or 'missing'}" for name in PROGRAMS))
    is_gpu = torch.cuda.is_available()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / 2**30:.1f} GiB"
        print(f"device {index}: {device.name}, {device.multi_processor_count} multiprocessors, {memory}")
    if not is_gpu:
        print("device: no GPU, torch sees none here; the ceilings are a CPU's")
    num_bytes, side = (2**31, 8192) if is_gpu else (2**22, 256)
    device = "cuda" if is_gpu else "cpu"
    copied = torch.randn(2, num_bytes // 2, device=device, dtype=torch.bfloat16)
    speed = 2 * num_bytes / seconds_of(lambda: copied[1].copy_(copied[0]), is_gpu=is_gpu)
    print(f"ceiling copy {speed / 1e12:.3f} TB/s")
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        done = 2 * side**3 / seconds_of(lambda a=a, b=b: a @ b, is_gpu=is_gpu)
        print(f"ceiling product {str(dtype).removeprefix('torch.')} {done / 1e12:.2f} TFLOP/s")


def version_of(package: str) -> str:
    """Return the installed version of a package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def seconds_of(function: Callable[[], object], *, is_gpu: bool) -> float:
    """Return the median seconds of a call, after one warm-up call."""
    taken: list[float] = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        function()
        if is_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
