"""The same parity and the same loop on one GPU: `make gpu`."""

import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch

from tests.distributed.test_actor_parity import SETTINGS, measure_all
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import settings
from tests.support.tiny import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_loss_and_gradients_equal_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False
    )  # containers set it; torch has TF32 off
    model = write_model(tmp_path / "model")
    write_model(tmp_path / "model_before", seed=1)
    measured = run_ranks(measure_all, 1, tmp_path, str(model), {})[0]
    for name in SETTINGS:
        result = measured[name]
        assert result["loss"] == pytest.approx(result["reference_loss"], rel=1e-4), name
        assert max(result["errors"].values()) <= 1e-4, name


def test_the_loop_trains_in_bfloat16(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    make = [
        sys.executable,
        root / "examples/quickstart/make_model.py",
        "--out",
        tmp_path / "model",
        "--steps",
        "2",
    ]
    subprocess.run(make, check=True)
    prompts = {"prompts": str(tmp_path / "model" / "prompts.jsonl")}
    tables = settings(tmp_path, "run", model={"dtype": "bfloat16"}, run={"num_rollouts": 2}, data=prompts)
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "megatron_dppo", "train", toml]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [row["kind"] for row in metrics_of(tmp_path / "run")].count("rollout") == 2
