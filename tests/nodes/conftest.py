"""One lab for the whole session: four machines, and SLURM on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.lab import Lab, shared_folders
from tests.nodes.training import torchrun, train
from tests.support.cluster import Cluster, require_programs
from tests.support.jobs import tiny_arguments


@pytest.fixture(scope="session")
def session_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A head and three nodes."""
    shared = shared_folders(tmp_path_factory.getbasetemp())
    with Lab(tmp_path_factory.mktemp("lab"), shared).running("head", "n0", "n1", "n2") as lab:
        yield lab


@pytest.fixture
def lab(session_lab: Lab) -> Iterator[Lab]:
    """All nodes, connected, which know each other by their names; they are repaired after the test."""
    yield session_lab
    session_lab.repair()


@pytest.fixture(scope="session")
def session_cluster(session_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """SLURM's controller on the head, and three nodes that are down after 10 s of silence."""
    require_programs()
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), session_lab.prefixes, slurmd_timeout_s=10)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(session_cluster: Cluster, lab: Lab) -> Iterator[Cluster]:
    """Idle nodes; after the test, all daemons and no job."""
    session_cluster.wait_for_idle_nodes()
    yield session_cluster
    lab.repair()
    session_cluster.start_nodes()
    session_cluster.cancel_jobs()


@pytest.fixture(scope="session")
def one_machine(session_lab: Lab, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks on one node: what every other run is compared with."""
    folder = tmp_path_factory.mktemp("one_machine")
    options = ("--nproc-per-node=2", "--master-addr=127.0.0.1", *train(tiny, folder / "run"))
    torchrun([session_lab.nodes["n0"]], options, folder / "log")
    return folder / "run"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What comes after an algorithm's TOML file to train a tiny model on two ranks."""
    return tiny_arguments(tmp_path_factory.mktemp("tiny"))
