"""What several files of unit tests need once, and no time limit for examples of hypothesis."""

import hypothesis
import pytest

from megatron_dppo.kernels.build import build_host_library
from megatron_dppo.kernels.library import KernelLibrary

hypothesis.settings.register_profile("busy", deadline=None)  # an example may take long on a busy machine
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels' source, compiled for the host."""
    return KernelLibrary(build_host_library(tmp_path_factory.mktemp("kernels") / "libdppo_host.so"))
