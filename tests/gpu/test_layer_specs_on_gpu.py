"""Transformer Engine's layers against ours on one GPU, and checkpoints; not measured yet, see the README."""

from pathlib import Path

import pytest
import torch

from tests.distributed.test_checkpoint_keys import MODELS
from tests.distributed.test_engine_names import compare_for_real
from tests.support.ranks import run_ranks
from tests.support.tiny_families import write_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


# Guesses, wide enough for other kernels' rounding; routes are replayed, so that none turns into another expert.
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("name", ["experts", "dense", "dense, biases, tied"])
def test_both_layer_specs_give_the_same(tmp_path: Path, name: str, dtype: str, limit: float) -> None:
    architecture, changes = MODELS[name]
    write_family(tmp_path / name, architecture, **changes)
    result = run_ranks(compare_for_real, 1, tmp_path, str(tmp_path / name), dtype)[0]
    if "fault" in result:
        pytest.skip(f"Transformer Engine: {result['fault']}")
    assert result["losses"]["transformer_engine"] == pytest.approx(result["losses"]["torch"], rel=limit)
    worst = max(result["errors"], key=result["errors"].get)
    assert result["errors"][worst] <= limit, f"{worst}: {result['errors'][worst]:.1e}"
    assert result["stored"]["transformer_engine"] == result["stored"]["torch"]
    assert result["changed"] == {"torch": [], "transformer_engine": []}
