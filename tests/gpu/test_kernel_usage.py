"""Registers and spills of the kernels that are compiled for this machine's GPU."""

import pytest
import torch

from megatron_dppo.kernels.build import cuda_library
from tests.support.kernel_usage import kernel_usage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_no_kernel_spills_or_takes_more_registers_than_promised() -> None:
    usages = kernel_usage(cuda_library())
    assert usages and all(usage.keeps_the_promise for usage in usages), usages
