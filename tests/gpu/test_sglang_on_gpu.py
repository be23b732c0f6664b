"""Pushes to a server on the trainer's own GPU, and memory given back: `make gpu-sglang`. Never run yet.

Uses bfloat16, because SGLang's kernels for experts compute in 16 bits, whatever the dtype of the weights. A CPU
runs the same steps in float32 (`tests/sglang/test_weight_sync.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.engines.weight_sync.probe import Limits
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES, RESERVE_BYTES
from tests.support.ranks import run_ranks
from tests.support.serving import MAX_TOKENS, PYTHON, START_TIMEOUT_S, write_served_model
from tests.support.sync_job import move_an_expert, release_and_push, require_moved

WAYS = ("disk", "tensor")  # NCCL has no two ranks on one GPU
ROUNDING = 0.05  # mean change of log-probs that other batches may leave in bfloat16
OPTIONS: dict[str, Any] = {
    "python": str(PYTHON),
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "mem_fraction_static": 0.3,
    "context_length": MAX_TOKENS,
    "skip_server_warmup": True,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs make sglang-venv on a machine with a GPU"),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A trainer of the tiny model, and a server of it on the same GPU."""
    folder = tmp_path_factory.mktemp("gpu")
    tables: dict[str, Any] = {
        "run": {"folder": str(folder / "run")},
        "model": {"load": str(write_served_model(folder / "model")), "dtype": "bfloat16"},
        "rollout": {"engine": "sglang", "routing_replay": "measure", "sglang": {"weight_sync": "tensor"}},
        "sglang": OPTIONS,
    }
    tables["rollout"]["sglang"]["colocated"] = True
    server = Server(plan_launch(Config.model_validate(tables)), folder / "run" / "servers", "gpu")
    try:
        assert server.start(START_TIMEOUT_S) is not None
        yield tables
    finally:
        server.stop(grace_s=0)


def test_a_pushed_expert_moves_the_tokens_that_are_routed_to_it(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The first push of each way is compared with the trainer too, and raises above the limits of bfloat16."""
    (result,) = run_ranks(move_an_expert, 1, tmp_path, settings, 10, WAYS)
    for way in WAYS:
        print(way, result[way])
        require_moved(result[way], ROUNDING)


def test_a_colocated_server_gives_its_memory_back_and_takes_it_again(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The ledger's bytes equal the driver's."""
    (result,) = run_ranks(release_and_push, 1, tmp_path, settings, 20)
    assert result["free_after_release"] > result["free_before"] + 2**30
    assert result["free_after_push"] < result["free_after_trainer_left"]
    assert result["free_at_the_end"] > result["free_after_push"] + 2**30
    assert 2**28 < result["outside_bytes"] < RESERVE_BYTES + ENGINE_RESIDUE_BYTES
    assert result["metrics"]["sync/probe_abs_diff_mean"] <= Limits.of("bfloat16").mean
