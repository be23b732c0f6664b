"""One cluster for the whole session, and tiny models to train on it."""

import runpy
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, require_programs
from tests.support.jobs import ROOT


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes of eight processors each, whatever this machine has."""
    require_programs()
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What comes after an algorithm's TOML file to train a tiny model on two ranks."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(ROOT / "examples" / "make_tiny.py"))["write_tiny"](folder)
    overrides = {
        "model.load": folder / "qwen3_moe",
        "data.prompts": folder / "prompts.jsonl",
        "evaluation.sets.aime24.prompts": folder / "held_out.jsonl",
        "evaluation.sets.aime25.prompts": folder / "held_out.jsonl",
        "parallel.expert": 2,
        "run.num_rollouts": 4,
    }
    sets = [part for name, value in overrides.items() for part in ("--set", f"{name}={value}")]
    return ("examples/tiny.toml", *sets)
