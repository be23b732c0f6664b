"""Published spellings of weights are read as one tensor per expert and linear, in a type to compute with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_dppo.architectures.published_names import (
    dequantized,
    dequantized_mxfp4,
    in_published_stacks,
)
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import read_convertible_config, write_description
from megatron_dppo.errors import ConfigError, ConversionError

EXPERTS = "model.layers.0.mlp.experts"
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Block by block, as publishers do: the largest value of a block becomes the largest of the type."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    blocks = [-(-size // 128) for size in weight.shape]
    values, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(blocks)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            place = (slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1)))
            scales[row, column] = weight[place].abs().max() / limit
            values[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def test_stacked_experts_are_read_one_by_one(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    save_file({f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}, tmp_path / "x.safetensors")
    weights = HFWeights(tmp_path)
    assert weights.names == {f"{EXPERTS}.{e}.{x}_proj.weight" for e in range(3) for x in ("gate", "up", "down")}
    assert weights.shapes()[f"{EXPERTS}.2.up_proj.weight"] == (4, 5)
    assert torch.equal(weights.tensor(f"{EXPERTS}.2.gate_proj.weight"), gate_up[2, :4])
    assert torch.equal(weights.tensor(f"{EXPERTS}.2.up_proj.weight"), gate_up[2, 4:])
    assert torch.equal(weights.tensor(f"{EXPERTS}.1.down_proj.weight"), down[1])


@pytest.mark.parametrize("shape", [(256, 128), (130, 300), (5, 7)])
def test_blocks_are_dequantised_as_their_scales_say(tmp_path: Path, shape: tuple[int, int]) -> None:
    values, scales = quantized(torch.randn(shape))
    save_file({"x.weight": values, "x.weight_scale_inv": scales}, tmp_path / "x.safetensors")
    weights = HFWeights(tmp_path)
    assert weights.names == {"x.weight"} and weights.dtypes() == {"x.weight": "BF16"}
    expected = torch.stack(
        [
            torch.stack([values[i, j].float() * scales[i // 128, j // 128] for j in range(shape[1])])
            for i in range(shape[0])
        ]
    )
    assert torch.equal(weights.tensor("x.weight"), expected.bfloat16())


def test_stacked_blocks_keep_their_experts_scales(tmp_path: Path) -> None:
    """The up projection starts in the middle of a scale block."""
    pairs = [quantized(torch.randn(200, 140)) for _ in range(2)]
    stack = {
        f"{EXPERTS}.gate_up_proj": torch.stack([values.view(torch.uint8) for values, _ in pairs]),
        f"{EXPERTS}.gate_up_proj_scale_inv": torch.stack([scales for _, scales in pairs]),
    }
    stack[f"{EXPERTS}.gate_up_proj"] = stack[f"{EXPERTS}.gate_up_proj"].view(torch.float8_e4m3fn)
    save_file(stack, tmp_path / "x.safetensors")
    weights = HFWeights(tmp_path)
    for expert, (values, scales) in enumerate(pairs):
        whole = dequantized(values, scales)
        assert torch.equal(weights.tensor(f"{EXPERTS}.{expert}.gate_proj.weight"), whole[:100])
        assert torch.equal(weights.tensor(f"{EXPERTS}.{expert}.up_proj.weight"), whole[100:])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "'x.weight' .* with no scales"),
        ({"x.weight_scale_inv": torch.ones(1, 1)}, "'x.weight_scale_inv' are scales of a weight"),
        (
            {"x.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(4, 1)},
            r"scales of shape \(4, 1\).* of shape \(1, 1\)",
        ),
        ({"x.weight": torch.zeros(4, 4), "x.weight_scale_inv": torch.ones(1, 1)}, "is F32 with scales"),
    ],
)
def test_weights_and_scales_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], words: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ConversionError, match=rf"x.safetensors: .*{words}"):
        HFWeights(tmp_path)


def test_the_description_of_dequantised_weights_calls_them_bfloat16(tmp_path: Path) -> None:
    content = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "float8", "quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    assert read_convertible_config(tmp_path) == expected
    write_description(tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


@pytest.mark.parametrize("change", [{"quant_method": "gptq"}, {"weight_block_size": [64, 64]}])
def test_other_quantised_formats_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    content = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": FP8 | change}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"quantization_config with .* in config.json; expected .*'fp8'"):
        read_convertible_config(tmp_path)


def test_an_unknown_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ConfigError, match=r"BertForMaskedLM.*Qwen3MoeForCausalLM.*LlamaForCausalLM"):
        read_convertible_config(tmp_path)


def test_only_some_files_are_mapped_at_a_time(tmp_path: Path) -> None:
    for index in range(5):
        save_file({f"t{index}": torch.full((3,), float(index))}, tmp_path / f"{index}.safetensors")
    weights = HFWeights(tmp_path, num_mapped=2)
    held = [weights.tensor(f"t{index}") for index in range(5)]
    assert len(weights._mapped) == 2
    assert [float(tensor[0]) for tensor in held] == [0, 1, 2, 3, 4]


OF_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_hidden_layers": 1}


def every_pair_in_mxfp4() -> tuple[Tensor, Tensor]:
    """[2, 256, 2, 16] blocks and [2, 256, 2] scales: each byte of values meets each scale but NaN's."""
    blocks = torch.arange(256).view(2, 8, 16).transpose(0, 1).expand(256, -1, -1, -1)
    scales = torch.arange(256).clamp(max=254)[:, None, None].expand(-1, 8, 2)
    return blocks.reshape(2, 1024, 2, 16).byte(), scales.reshape(2, 1024, 2).byte()


def test_mxfp4_has_the_values_that_transformers_computes() -> None:
    blocks, scales = every_pair_in_mxfp4()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).mT
    found = dequantized_mxfp4(blocks, scales)
    assert found.dtype == torch.bfloat16 and len(found.float().abs().unique()) > 500
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


def test_interleaved_stacks_are_read_one_by_one_and_made_again(tmp_path: Path) -> None:
    """Experts of [in, out], with gate and up in turn, and of MXFP4, [out, in]."""
    (tmp_path / "config.json").write_text(json.dumps(OF_GPT_OSS))
    blocks, scales = every_pair_in_mxfp4()
    stacks = {
        f"{EXPERTS}.gate_up_proj_bias": torch.randn(2, 1024).bfloat16(),
        f"{EXPERTS}.down_proj": torch.randn(2, 512, 7).bfloat16(),
        f"{EXPERTS}.down_proj_bias": torch.randn(2, 7).bfloat16(),
    }
    in_mxfp4 = {f"{EXPERTS}.gate_up_proj_blocks": blocks, f"{EXPERTS}.gate_up_proj_scales": scales}
    save_file(stacks | in_mxfp4, tmp_path / "x.safetensors")
    weights, whole = HFWeights(tmp_path), dequantized_mxfp4(blocks, scales)
    linears = [f"{EXPERTS}.{e}.{x}_proj" for e in range(2) for x in ("gate", "up", "down")]
    assert weights.names == {f"{linear}.{kind}" for linear in linears for kind in ("weight", "bias")}
    assert weights.shapes()[f"{EXPERTS}.1.up_proj.weight"] == (512, 64)
    assert set(weights.dtypes().values()) == {"BF16"}
    assert torch.equal(weights.tensor(f"{EXPERTS}.1.up_proj.weight").float(), whole[1, 1::2].float())
    assert torch.equal(
        weights.tensor(f"{EXPERTS}.0.gate_proj.bias"), stacks[f"{EXPERTS}.gate_up_proj_bias"][0, ::2]
    )
    assert torch.equal(weights.tensor(f"{EXPERTS}.1.down_proj.weight"), stacks[f"{EXPERTS}.down_proj"][1].T)
    read = [(name, weights.tensor(name)) for name in sorted(weights.names, reverse=True)]
    again = dict(in_published_stacks(read, 2))
    expected = stacks | {f"{EXPERTS}.gate_up_proj": whole.mT}
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name].float(), tensor.float()) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "tensors",
    [
        {"gate_up_proj_blocks": torch.zeros(2, 8, 1, 16).byte()},
        {"down_proj_scales": torch.zeros(2, 8, 1).byte()},
        {
            "down_proj_blocks": torch.zeros(2, 8, 1, 16).byte(),
            "down_proj_scales": torch.zeros(2, 8, 2).byte(),
        },
        {"down_proj_blocks": torch.zeros(2, 8, 1, 16), "down_proj_scales": torch.zeros(2, 8, 1).byte()},
    ],
    ids=list,
)
def test_blocks_without_the_scales_of_mxfp4_are_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OF_GPT_OSS))
    save_file({f"{EXPERTS}.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(ConversionError, match=r"x.safetensors: .*Expected blocks"):
        HFWeights(tmp_path)
