"""Adapter training: runs that stop and resume, and the tools that read their checkpoints."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoints.hf_folder import HFWeights
from tests.distributed.test_training_run import train, with_data
from tests.support.commands import python
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import without_clocks

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
TARGETS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("dtype", "world_size"), [pytest.param("float32", 1, marks=pytest.mark.slow), ("bfloat16", 2)]
)
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    task: Path, tmp_path: Path, dtype: str, world_size: int
) -> None:
    whole_name, halved_name = (f"{name}_{world_size}" for name in ("whole", "halved"))
    changes: dict[str, Any] = {
        "run": {"num_rollouts": 2},
        "model": {"dtype": dtype},
        "parallel": {"expert": world_size},
        "lora": {"rank": 8, "alpha": 24, "targets": TARGETS},
        "rollout": {"routing_replay": "measure"},
        "algorithm": {"ref_kl_coef": 0.1},
    }
    whole = run_ranks(train, world_size, tmp_path, with_data(task, whole_name, **changes))[0]
    run_ranks(train, world_size, tmp_path, with_data(task, halved_name, **changes), 1)
    resumed = run_ranks(train, world_size, tmp_path, with_data(task, halved_name, **changes))[0]
    assert whole["weights"].keys() == resumed["weights"].keys()
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in whole["weights"].items())
    assert len(whole["moments"]) == len(resumed["moments"])
    assert all(torch.equal(x, y) for x, y in zip(whole["moments"], resumed["moments"], strict=True))
    assert without_clocks(metrics_of(task / halved_name)) == without_clocks(metrics_of(task / whole_name))
    kl = [row["policy/ref_kl"] for row in metrics_of(task / whole_name, "step")]
    assert kl[0] < 1e-9 and min(kl[2:]) > 1e-4, "from the model without its adapters"
    before = HFWeights(task / "model")
    for name, tensor in whole["weights"].items():
        is_target = name.split(".")[-2] in TARGETS
        assert torch.equal(before.tensor(name).to(tensor.dtype), tensor) != is_target, name


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a run whose layers are split over two processes, and the run's last weights."""
    changes: dict[str, Any] = {
        "run": {"num_rollouts": 1},
        "parallel": {"tensor": 2},
        "lora": {"rank": 8, "alpha": 24, "targets": TARGETS},
    }
    folder = tmp_path_factory.mktemp("trained")
    weights = run_ranks(train, 2, folder, with_data(task, "trained", **changes))[0]["weights"]
    checkpoints = task / "trained" / "checkpoints"
    return checkpoints / (checkpoints / "latest").read_text().strip(), weights


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python(TOOL, *arguments)


def test_to_hf_merges_the_adapters(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    done = convert("to-hf", "--megatron", trained[0], "--out", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    found = HFWeights(tmp_path / "hf")
    assert found.names == trained[1].keys()
    for name, tensor in trained[1].items():  # a product of halves may round otherwise than one of the whole
        torch.testing.assert_close(found.tensor(name), tensor, rtol=1e-6, atol=1e-7)


def test_to_adapter_writes_what_was_trained(
    task: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    done = convert("to-adapter", "--megatron", trained[0], "--out", tmp_path / "adapter")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    named = (config["r"], config["lora_alpha"], config["base_model_name_or_path"])
    assert named == (8, 24, str(task / "model")), "model.load of the run"
    assert sorted(config["target_modules"]) == sorted(TARGETS)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    before = HFWeights(task / "model")
    modules = {name.partition(".lora_")[0] for name in factors}
    assert len(modules) * 2 == len(factors) == 2 * 2 * (2 + 3 * 8), "two layers, eight experts"
    for module in modules:
        update = 3.0 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        name = module.removeprefix("base_model.model.") + ".weight"
        torch.testing.assert_close(before.tensor(name) + update, trained[1][name], rtol=1e-5, atol=1e-6)


def test_adapters_are_never_dropped_in_silence(
    task: Path, trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        f"""
        [run]
        folder = "{tmp_path / "run"}"
        [model]
        load = "{trained[0]}"
        [data]
        prompts = "{task / "prompts.jsonl"}"
        reward = "arithmetic"
        max_prompt_tokens = 16
        [rollout]
        max_response_tokens = 8
        """
    )
    done = python("-m", "megatron_dppo", "train", toml)
    assert done.returncode == 2
    assert "holds LoRA adapters" in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_without_adapters_makes_no_adapter(task: Path, tmp_path: Path) -> None:
    assert convert("to-megatron", "--hf", task / "model", "--out", tmp_path / "megatron").returncode == 0
    done = convert("to-adapter", "--megatron", tmp_path / "megatron", "--out", tmp_path / "adapter")
    assert done.returncode == 2
    assert "holds no LoRA adapters" in done.stderr
