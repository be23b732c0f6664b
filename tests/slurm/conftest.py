"""One cluster for the whole session, and tiny models to train on it."""

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, require_loopback, require_programs
from tests.support.jobs import tiny_arguments


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of eight processors each, whatever this machine has."""
    require_programs()
    require_loopback()
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What comes after an algorithm's TOML file to train a tiny model on two ranks."""
    return tiny_arguments(tmp_path_factory.mktemp("tiny"))
