"""What several files of unit tests need once."""

import pytest

from megatron_dppo.kernels.build import build_host_library
from megatron_dppo.kernels.library import KernelLibrary


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels' source, compiled for the host."""
    return KernelLibrary(build_host_library(tmp_path_factory.mktemp("kernels") / "libdppo_host.so"))
