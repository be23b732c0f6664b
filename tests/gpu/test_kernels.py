"""The compiled kernels on a GPU: the tests that the host build passes, and what only a GPU can show.

The tests of tests/unit/test_kernel_*.py run unchanged, on a library that moves tensors to the GPU and back.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.kernels.build import cuda_library
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.types import RolloutTokens, each_token
from tests.support.kernel_host import gradient_of, random_tokens, shards_of, statistics_of
from tests.unit import (
    test_kernel_combine,
    test_kernel_roundoff,
    test_kernel_rows,
    test_kernel_source,
    test_kernel_vectors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SANITIZED = Path(__file__).parent / "sanitized_kernels.py"
OF_THE_HOST = {  # they are about the host's build, or hold a file as a tensor
    "test_addresses_beyond_2_to_the_31",
    "test_the_binding_names_what_does_not_fit",
    "test_the_c_side_refuses_null_pointers_and_unknown_choices",
    "test_the_shim_reports_waits_that_hang_or_are_undefined",
}
for _module in (
    test_kernel_combine,
    test_kernel_roundoff,
    test_kernel_rows,
    test_kernel_source,
    test_kernel_vectors,
):
    for _name in [name for name in vars(_module) if name.startswith("test_") and name not in OF_THE_HOST]:
        assert _name not in globals(), f"two kernel tests are called {_name}"
        globals()[_name] = getattr(_module, _name)


class Moved:
    """Tensors of one call on a device: strides and offsets are kept, and shared tensors stay shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = value.untyped_storage().data_ptr(), value.dtype
        if key not in self._storages:
            here = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            self._storages[key] = here, torch.empty_like(here, device=self._device).copy_(here)
        there = self._storages[key][1]
        return there.as_strided(value.size(), value.stride(), value.storage_offset())

    def return_to(self, value: Tensor) -> None:
        """Bring back everything that shares the tensor's storage."""
        here, there = self._storages[value.untyped_storage().data_ptr(), value.dtype]
        here.copy_(there)


class LibraryOn(KernelLibrary):
    """A library for one device, called with tensors of the CPU."""

    def __init__(self, path: Path, device: torch.device) -> None:
        super().__init__(path)
        self._device = device

    def row_statistics(self, logits: Tensor, *rest: Any, **named: Any) -> Tensor:
        moved = Moved(self._device)
        named = {name: moved(value) for name, value in named.items()}
        return super().row_statistics(moved(logits), *map(moved, rest), **named).cpu()

    def combine(self, statistics: Tensor, objective: Objective, tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
        moved = Moved(self._device)
        on_device = each_token(tokens, lambda values, _: moved(values))
        rows, topk = super().combine(moved(statistics), objective, on_device)
        return rows.cpu(), topk.cpu()

    def logits_gradient(self, logits: Tensor, *rest: Any, out: Tensor, **named: Any) -> None:
        moved = Moved(self._device)
        named = {name: moved(value) for name, value in named.items()}
        super().logits_gradient(moved(logits), *map(moved, rest), out=moved(out), **named)
        moved.return_to(out)


@pytest.fixture(scope="session")
def host_library() -> KernelLibrary:
    """The GPU's, under the name that the kernel tests ask for."""
    return LibraryOn(cuda_library(), torch.device("cuda"))


@pytest.fixture
def kernels(host_library: KernelLibrary) -> KernelLibrary:
    """The GPU's, for the tests that also run on the reference."""
    return host_library


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(host_library: KernelLibrary, dtype: torch.dtype) -> None:
    tokens = random_tokens(512, 9001, 20, dtype=dtype)
    objective = preset("dppo_topk_kl", entropy_coef=0.01)
    results = []
    for _ in range(2):
        shards = shards_of(tokens, 2, 1e4)
        statistics = statistics_of(host_library, tokens, shards, with_entropy=True)
        planes, topk = test_kernel_combine.combined(host_library, tokens, statistics, objective)
        assert topk is not None
        outs = [torch.empty_like(shard.logits) for shard in shards]
        gradients = [
            gradient_of(host_library, tokens, shard, planes, out=out)
            for shard, out in zip(shards, outs, strict=True)
        ]
        results.append([statistics, planes, topk, *gradients])
    for first, second in zip(*results, strict=True):
        assert torch.equal(bits(first), bits(second))


def bits(values: Tensor) -> Tensor:
    """As integers: NaN equals itself."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    # Without PyTorch's own cache of memory every tensor ends where its allocation does.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, str(SANITIZED)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-4000:]
