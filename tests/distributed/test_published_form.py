"""Published forms of weights: converted, exported in bfloat16, and trained without a conversion.

DeepSeek-V3's: 8-bit blocks, float32 expert biases, layers that predict further tokens. gpt-oss's: MXFP4.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_dppo.architectures.published_names import BLOCK, in_published_stacks, stays_float32
from megatron_dppo.runtime.process import Runtime
from tests.support.converting import convert, converted, differences
from tests.support.ranks import run_ranks
from tests.support.tiny_families import write_family

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
LAYERS = 3
FURTHER = f"model.layers.{LAYERS}."


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in 8 bits, and a scale for each block, whose largest value becomes the type's."""
    by_rows = [rows.split(BLOCK, 1) for rows in weight.float().split(BLOCK)]
    limit = torch.finfo(torch.float8_e4m3fn).max
    scales = torch.stack([torch.stack([block.abs().max() / limit for block in blocks]) for blocks in by_rows])
    return (weight.float() / spread(scales, weight)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, weight: Tensor) -> Tensor:
    """Each element's scale."""
    rows, columns = weight.shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def read(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantize: the bfloat16 tensor that `quantized` encodes."""
    return (values.float() * spread(scales, values)).bfloat16()


def write_published(folder: Path) -> dict[str, Tensor]:
    """Write the folder; return what it is to be read as."""
    write_family(folder, "DeepseekV3ForCausalLM", torch.bfloat16, vocab_size=97, intermediate_size=132)
    (file,) = folder.glob("*.safetensors")
    stored, expected = dict(load_file(file)), dict[str, Tensor]()
    for name, tensor in list(stored.items()):
        expected[name] = tensor
        if stays_float32(name):
            generator = torch.Generator().manual_seed(len(name))
            stored[name] = expected[name] = 7 + 0.25 * torch.randn(tensor.shape, generator=generator)
        elif "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantized(tensor)
            expected[name] = read(stored[name], stored[f"{name}_scale_inv"])
    stored[f"{FURTHER}eh_proj.weight"], stored[f"{FURTHER}eh_proj.weight_scale_inv"] = quantized(
        torch.ones(32, 64)
    )
    stored[f"{FURTHER}mlp.gate.e_score_correction_bias"] = torch.ones(8)
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": FP8, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("published") / "model"
    return folder, write_published(folder)


def test_it_is_converted_and_exported_in_bfloat16_with_float32_biases(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = published
    done = convert("to-megatron", "--hf", folder, "--out", tmp_path / "megatron")
    assert done.exit_code == 0, done.output
    converted("verify", folder, tmp_path / "megatron")
    converted("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", "--dtype", "bfloat16")
    assert differences(tmp_path / "back", expected) == []
    for out in (tmp_path / "back", tmp_path / "megatron" / "hf"):
        config = json.loads((out / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["num_nextn_predict_layers"] == 0
    assert "left out: 2 tensors" in convert("inspect", folder).stdout


@pytest.mark.parametrize("said", [None, 0])
def test_layers_for_further_tokens_are_left_out_though_config_json_has_none(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path, said: int | None
) -> None:
    folder, expected = tmp_path / "model", published[1]
    shutil.copytree(published[0], folder)
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    said_by = {} if said is None else {"num_nextn_predict_layers": said}
    (folder / "config.json").write_text(json.dumps(config | said_by))
    converted("to-megatron", "--hf", folder, "--out", tmp_path / "megatron")
    converted("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert differences(tmp_path / "back", expected) == []
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "left out: 2 tensors" in convert("inspect", folder).stdout


def load(runtime: Runtime, folder: str) -> dict[str, Any]:
    """What a bfloat16 actor holds and its embedded engine receives, straight from the folder."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.weight_sync.syncs import InProcessSync
    from megatron_dppo.rollout.rollouts import build_engine

    config = Config.model_validate({"model": {"load": folder, "dtype": "bfloat16"}})
    actor = Actor(config, runtime)
    engine: Any = build_engine(config, Path(folder), runtime.device)
    InProcessSync(actor.weights, engine, runtime).push(version=1)
    return {
        "actor": {name: tensor.clone() for name, tensor in actor.weights()},
        "engine": {name: tensor.clone() for name, tensor in engine._targets.items()},
    }


def test_it_is_trained_and_sampled_from_without_a_conversion(
    published: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = published
    found = run_ranks(load, 1, tmp_path, str(folder))[0]
    biases = [name for name in expected if stays_float32(name)]
    assert len(biases) == LAYERS - 1
    assert not all(torch.equal(expected[name], expected[name].bfloat16().float()) for name in biases)
    for holder in ("actor", "engine"):
        assert found[holder].keys() == expected.keys()
        changed = [name for name, tensor in expected.items() if not torch.equal(found[holder][name], tensor)]
        assert changed == [], holder
        assert {found[holder][name].dtype for name in biases} == {torch.float32}


# gpt-oss: stacks of experts in MXFP4.

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
STACKS = ("gate_up_proj", "down_proj")


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write the folder; return what transformers makes of it, under published names, in bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 32}  # multiples of a block
    write_family(folder, "GptOssForCausalLM", torch.bfloat16, **sizes)
    (file,) = folder.glob("*.safetensors")
    stored, expected = dict(load_file(file)), dict[str, Tensor]()
    for name, tensor in list(stored.items()):
        expected[name] = tensor
        if name.endswith(STACKS):
            del stored[name]
            experts, num_inputs, num_outputs = tensor.shape
            generator = torch.Generator().manual_seed(len(expected))
            shape = (experts, num_outputs, num_inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator).byte()
            scales = torch.randint(121, 126, shape[:-1], generator=generator).byte()
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return expected


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return folder, write_mxfp4(folder)


def test_mxfp4_is_converted_and_exported_in_bfloat16_with_published_names(
    in_mxfp4: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = in_mxfp4
    converted("to-megatron", "--hf", folder, "--out", tmp_path / "megatron")
    converted("verify", folder, tmp_path / "megatron")
    shards = ("--shard-size", "0.02MB")  # smaller than a stack
    converted("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back", *shards)
    written = {n: t for file in (tmp_path / "back").glob("*.safetensors") for n, t in load_file(file).items()}
    assert written.keys() == expected.keys()
    changed = [name for name, tensor in expected.items() if not torch.equal(written[name], tensor)]
    assert changed == [] and {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    for out in (tmp_path / "back", tmp_path / "megatron" / "hf"):
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_mxfp4_is_trained_and_sampled_from_without_a_conversion(
    in_mxfp4: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, expected = in_mxfp4
    found = run_ranks(load, 1, tmp_path, str(folder))[0]
    for holder in ("actor", "engine"):
        stacks = dict(in_published_stacks(found[holder].items(), num_experts=8))
        assert stacks.keys() == expected.keys(), holder
        changed = [name for name, tensor in expected.items() if not torch.equal(stacks[name], tensor)]
        assert changed == [], holder
