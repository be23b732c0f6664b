"""Grouped experts against sequential ones on one GPU, in both types."""

from pathlib import Path

import pytest
import torch

from tests.distributed.test_experts import compare_all
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_grouped_experts_equal_sequential_ones(tmp_path: Path, dtype: str, limit: float) -> None:
    model = write_model(tmp_path / "model")
    errors = run_ranks(compare_all, 1, tmp_path, str(model), dtype)[0]
    worst = {tokens: max(of_case.values()) for tokens, of_case in errors.items()}
    assert max(worst.values()) <= limit, worst
