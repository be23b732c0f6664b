"""A checkpoint of adapters of one layout on another: the same factors, moments and course after."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.runtime.process import Runtime
from tests.distributed import test_resharding
from tests.distributed.test_resharding import LAYOUTS, NUM_BEFORE, NUM_LAYERS
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

PAIRS = [("TP2", "one process"), ("EP2", "TP2"), ("one process", "PP2 VPP2"), ("PP2 VPP2", "CP2 EP2")]


build = partial(test_resharding.build, lora={"rank": 8, "alpha": 24})


def save_all(runtime: Runtime, *arguments: Any) -> dict[str, Any]:
    """Train, save, and train on."""
    test_resharding.build = build
    return test_resharding.save_all(runtime, *arguments)


def load_all(runtime: Runtime, *arguments: Any) -> dict[str, Any]:
    """Load, save again, and train on."""
    test_resharding.build = build
    return test_resharding.load_all(runtime, *arguments)


@pytest.mark.slow
def test_adapters_move_between_layouts(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_hidden_layers=NUM_LAYERS)
    inputs = str(tmp_path / "model"), str(tmp_path)
    saved: dict[str, Any] = {}
    for size in (1, 2):
        sources = list(dict.fromkeys(source for source, _ in PAIRS if LAYOUTS[source][0] == size))
        saved |= run_ranks(save_all, size, tmp_path, *inputs, sources)[0]
    for size in (1, 2):
        targets = [target for _, target in PAIRS if LAYOUTS[target][0] == size]
        found = run_ranks(load_all, size, tmp_path, *inputs, targets, PAIRS)[0]
        for source, target in [pair for pair in PAIRS if pair[1] in targets]:
            result = found[f"{source} -> {target}"]
            assert not isinstance(result, str), f"{source} -> {target}: {result}"
            assert result[0] == [], f"{source} -> {target}: not bitwise the same, gathered whole"
            assert result[1] == pytest.approx(saved[source], rel=1e-5), f"{source} -> {target}"
            assert result[2] == NUM_BEFORE
