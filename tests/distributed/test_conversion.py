"""`megatron-dppo convert` and tools/convert_checkpoint.py both ways, bit for bit, and what it refuses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from converting import convert, differences
from tiny import write_model
from transformers import Qwen3MoeForCausalLM

from megatron_dppo.checkpoints.hf_folder import HFWeights

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model with a dense layer among MoE ones, and its Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("conversion")
    write_model(folder / "first", mlp_only_layers=[1])
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "first", dtype=torch.bfloat16)
    model.save_pretrained(folder / "hf", max_shard_size="50KB")
    command = [sys.executable, TOOL, "to-megatron", "--hf", folder / "hf", "--out", folder / "megatron"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_there_and_back_is_bit_exact(converted: Path) -> None:
    done = convert(
        *("to-hf", "--megatron", converted / "megatron", "--out", converted / "back", "--shard-size", "0.05MB")
    )
    assert done.exit_code == 0, done.stderr
    assert set(HFWeights(converted / "back").dtypes().values()) == {"BF16"}
    assert differences(converted / "hf", converted / "back") == []
    model = Qwen3MoeForCausalLM.from_pretrained(converted / "back", dtype=torch.bfloat16)
    original = Qwen3MoeForCausalLM.from_pretrained(converted / "hf", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    assert (converted / "back" / "config.json").read_bytes() == (converted / "hf" / "config.json").read_bytes()


def test_an_existing_output_is_refused(converted: Path) -> None:
    done = convert("to-megatron", "--hf", converted / "hf", "--out", converted / "megatron")
    assert done.exit_code == 2
    assert "exists" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architectures", ["BertForMaskedLM"], "BertForMaskedLM"),
        ("norm_topk_prob", False, "norm_topk_prob"),
        ("hidden_size", 64, "has shape"),
        ("num_hidden_layers", 2, "left over"),
    ],
)
def test_weights_and_config_that_do_not_fit_are_refused(
    converted: Path, tmp_path: Path, key: str, value: object, words: str
) -> None:
    shutil.copytree(converted / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    done = convert("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_torn_megatron_checkpoint_is_refused(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / "megatron", tmp_path / "torn")
    for file in (tmp_path / "torn" / "megatron").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:50])
    done = convert("to-hf", "--megatron", tmp_path / "torn", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.stderr
    assert "torn" in done.stderr
    done = convert("to-hf", "--megatron", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.exit_code == 2
