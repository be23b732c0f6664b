"""Vision models: the text model is converted and served, and the missing vision is reported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import has_vision
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import copy_model_files
from megatron_dppo.config import Config
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.errors import ConfigError
from megatron_dppo.rollout.rollouts import build_engine
from tests.support.converting import convert
from tests.support.tiny_families import config_of

VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)


@pytest.fixture(scope="module", params=["Qwen3_5Moe", "Qwen3_5"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as publishers write it: nested config, tied embeddings, vision, further tokens' layers."""
    name, folder = request.param, tmp_path_factory.mktemp("published")
    text = config_of(f"{name}ForCausalLM", mtp_num_hidden_layers=1).to_dict() | {"tie_word_embeddings": False}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISION, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert any(each.startswith("model.visual.") for each in index["weight_map"])
    assert all(each.startswith("model.language_model.") for each in index["weight_map"] if ".layers." in each)
    return folder


def test_the_text_model_goes_there_and_back_bit_for_bit(
    published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        done = convert("to-megatron", "--hf", published, "--out", tmp_path / "megatron")
    assert done.exit_code == 0, done.output
    assert "model.visual." in caplog.text and "left out" in caplog.text
    assert convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back").exit_code == 0
    written: dict[str, Any] = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "vision_config" not in written and "text_config" not in written
    assert read_model_sizes(published) == read_model_sizes(tmp_path / "megatron")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert type(text).__name__ == written["architectures"][0]
    whole = transformers.AutoModelForImageTextToText.from_pretrained(published, dtype=torch.bfloat16)
    expected = whole.model.language_model.state_dict()
    assert expected.keys() == text.model.state_dict().keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in text.model.state_dict().items())
    assert torch.equal(text.lm_head.weight, whole.lm_head.weight)
    tensors = {name for file in (tmp_path / "back").glob("*.safetensors") for name in load_file(file)}
    assert tensors == HFWeights(published).names


def test_sglang_would_serve_the_model_with_vision(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside a model with vision"):
        served_model(published, ())
    copy_model_files(published, tmp_path)
    assert not has_vision(tmp_path)


def test_an_engine_of_the_folder_serves_its_text_model(published: Path) -> None:
    config = Config.model_validate({"model": {"load": str(published)}, "rollout": {"engine": "transformers"}})
    engine = build_engine(config, published, torch.device("cpu"))
    assert isinstance(engine, TransformersEngine)
    weights = HFWeights(published)
    engine.load_weights([(name, weights.tensor(name)) for name in sorted(weights.names)], version=1)
    assert engine.weight_version == 1
