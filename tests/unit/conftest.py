"""What several files of unit tests need once, and how hypothesis draws its examples."""

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from megatron_dppo.kernels import reference
from megatron_dppo.kernels.build import build_host_library
from megatron_dppo.kernels.library import KernelLibrary

# An example, or the search for one, may take long on a busy machine. HYPOTHESIS_PROFILE=random draws others.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("random", _PATIENT)
hypothesis.settings.register_profile("repeatable", _PATIENT, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    """The kernels' source, compiled for the host."""
    return KernelLibrary(build_host_library(tmp_path_factory.mktemp("kernels") / "libdppo_host.so"))


@pytest.fixture(params=["host", "PyTorch"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """The three kernels: their source, compiled for the host, and the reference."""
    return request.getfixturevalue("host_library") if request.param == "host" else reference


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers import the tests' modules, from the trainer's working directory or PYTHONPATH."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
