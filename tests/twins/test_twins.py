"""Every algorithm of every experiment trains for real, with examples/tiny.toml as its last layer."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from experiments import ALGORITHMS, ROOT, Algorithm, tiny_family
from twin_process import forked, train

from examples.make_tiny import write_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user would stand: beside examples/, with the tiny models made."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "examples").symlink_to(ROOT / "examples")
    assert forked(write_tiny, folder / "runs" / "tiny") == 0
    return folder


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_twin_of_an_algorithm_trains(folder: Path, algorithm: Algorithm) -> None:
    run = Path("runs") / "twins" / algorithm.experiment / algorithm.name
    log = folder / f"{algorithm.experiment}-{algorithm.name}.log"
    layers = [str(path) for path in (*algorithm.layers, Path("examples/tiny.toml"))]
    settings = [f"run.folder={run}", f"model.load=runs/tiny/{tiny_family(algorithm)}"]
    arguments = [*layers, *(part for setting in settings for part in ("--set", setting))]
    assert train(arguments, folder, log) == 0, log.read_text()[-3000:]
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    assert _learns(steps)


def _learns(steps: list[dict[str, Any]]) -> bool:
    return all(row["optimizer/grad_norm"] > 0 and not row["optimizer/skipped_steps"] for row in steps[::2])
