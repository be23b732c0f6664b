"""What several files of unit tests need once."""

import pytest
from kernel_host import CSRC, compile_for_host

from megatron_dppo.kernels.library import KernelLibrary


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels' source, compiled for the host."""
    return KernelLibrary(
        compile_for_host(CSRC / "host.cpp", tmp_path_factory.mktemp("kernels") / "libdppo_host.so")
    )
