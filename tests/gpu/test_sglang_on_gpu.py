"""Pushes to a server on the trainer's own GPU, and memory given back: `make gpu-sglang`. Never run yet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES, RESERVE_BYTES
from tests.support.ranks import run_ranks
from tests.support.serving import MAX_TOKENS, PYTHON, START_TIMEOUT_S, write_served_model
from tests.support.sync_job import push_every_way, release_and_push

WAYS = ("disk", "tensor")  # NCCL has no two ranks on one GPU
OPTIONS: dict[str, Any] = {
    "python": str(PYTHON),
    "dtype": "float32",
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
        "model": {"load": str(write_served_model(folder / "model")), "dtype": "float32"},
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


def test_pushed_weights_are_served(settings: dict[str, Any], tmp_path: Path) -> None:
    (result,) = run_ranks(push_every_way, 1, tmp_path, settings, 10, WAYS)
    for way in WAYS:
        assert result[way]["stale"]
        assert result[way]["metrics"]["sync/probe_abs_diff_max"] <= 1e-4
        assert result[way]["versions"] == {result[way]["version"]}


def test_a_colocated_server_gives_its_memory_back_and_takes_it_again(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """What the ledger says is what the driver finds."""
    (result,) = run_ranks(release_and_push, 1, tmp_path, settings, 20)
    assert result["free_after_release"] > result["free_before"] + 2**30
    assert result["free_after_push"] < result["free_after_trainer_left"]
    assert result["free_at_the_end"] > result["free_after_push"] + 2**30
    assert 2**28 < result["outside_bytes"] < RESERVE_BYTES + ENGINE_RESIDUE_BYTES
    assert result["metrics"]["sync/probe_abs_diff_max"] <= 1e-4
