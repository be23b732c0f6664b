"""FP8 and NVFP4 as nvidia-modelopt computes them, and the embedded engine that rounds to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.checkpoints.weight_formats import (
    WeightFormat,
    dequantize_fp8,
    dequantize_nvfp4,
    fused_linears,
    is_linear,
    quantize_fp8,
    quantize_nvfp4,
    round_linears,
    round_values,
    scale_for,
)
from megatron_dppo.config.rollout import EnginePrecision
from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.embedded.engine import (
    TransformersEngine,
    checkpoint_targets,
)
from megatron_dppo.errors import RolloutError
from tests.unit.test_transformers_engine import checkpoint, moe_config, reference_model, requests_of

ENGINE: dict[WeightFormat, EnginePrecision] = {"fp8": "modelopt_fp8", "nvfp4": "modelopt_nvfp4"}


def a_weight(dtype: torch.dtype) -> Tensor:
    """Values of many sizes, a block of zeros, one of a single value, and some so small that they vanish."""
    torch.manual_seed(0)
    weight = torch.randn(24, 64) * torch.logspace(-6, 1, 24).unsqueeze(1)
    weight[3, 16:32] = 0
    weight[4, 32:48] = 0.5
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("larger", [1.0, 1.7])
def test_fp8_equals_modelopts(dtype: torch.dtype, larger: float) -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    weight = a_weight(dtype)
    largest = weight.abs().amax() * larger
    scale = scale_for("fp8", largest)
    values = quantize_fp8(weight, scale)
    expected, _ = FP8QTensor.quantize(weight, scales=largest.float() / 448)
    assert torch.equal(values.float(), expected._quantized_data.float())
    assert torch.equal(dequantize_fp8(values, scale), expected.dequantize(torch.float32, scale=scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("larger", [1.0, 1.7])
def test_nvfp4_equals_modelopts(dtype: torch.dtype, larger: float) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = a_weight(dtype)
    largest = weight.abs().amax() * larger
    scale = scale_for("nvfp4", largest)
    packed, block_scales = quantize_nvfp4(weight, scale)
    found: Any = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=largest.float() / (6 * 448))
    expected, expected_scales, _ = found
    assert torch.equal(packed, expected._quantized_data)
    assert torch.equal(block_scales.float(), expected_scales.float())
    whole = expected.dequantize(torch.float32, scale=expected_scales, double_scale=scale, block_sizes={-1: 16})
    assert torch.equal(dequantize_nvfp4(packed, block_scales, scale), whole)


def test_halfway_between_two_4_bit_values_the_even_one_is_taken() -> None:
    halfway = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *[0.0] * 8]])
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, *[0.0] * 8]])
    for sign in (1, -1):
        assert torch.equal(round_values(sign * halfway, "nvfp4", torch.tensor(1.0)), sign * expected)


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4"])
def test_rounding_is_idempotent_and_keeps_zeros(weight_format: WeightFormat) -> None:
    weight = a_weight(torch.float32)
    scale = scale_for(weight_format, weight.abs().amax())
    once = round_values(weight, weight_format, scale)
    assert torch.equal(round_values(once, weight_format, scale), once)
    zeros = torch.zeros(2, 16)
    assert not round_values(zeros, weight_format, scale_for(weight_format, zeros.abs().amax())).any()


@pytest.mark.parametrize(("largest", "taken_for"), [(2e-12, 2e-12), (6e-13, 1e-12), (0.0, 1e-12)])
@pytest.mark.parametrize(("weight_format", "most"), [("fp8", 448.0), ("nvfp4", 6 * 448.0)])
def test_scale_of_tiny_values_and_of_zeros(
    weight_format: WeightFormat, most: float, largest: float, taken_for: float
) -> None:
    scale = scale_for(weight_format, torch.tensor(largest))
    torch.testing.assert_close(scale, torch.tensor(taken_for / most), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4"])
def test_values_above_the_scale_saturate(weight_format: WeightFormat) -> None:
    weight = torch.full((1, 16), 3.0)
    scale = scale_for(weight_format, torch.tensor(2.0))
    assert round_values(weight, weight_format, scale).tolist() == [pytest.approx([2.0] * 16)]


def test_which_linears_share_a_scale() -> None:
    names = checkpoint(reference_model(moe_config(num_hidden_layers=1, num_experts=2)))
    attention, experts = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
    assert set(fused_linears(names)) == {
        tuple(f"{attention}{x}_proj.weight" for x in "qkv"),
        (f"{attention}o_proj.weight",),
        *((f"{experts}{i}.gate_proj.weight", f"{experts}{i}.up_proj.weight") for i in (0, 1)),
        *((f"{experts}{i}.down_proj.weight",) for i in (0, 1)),
    }
    others = [name for name in names if not is_linear(name)]
    assert {name.rsplit(".", 2)[-2] for name in others if "norm" not in name} == {
        "embed_tokens",
        "lm_head",
        "gate",
    }


def held_by(engine: TransformersEngine) -> Mapping[str, Tensor]:
    return checkpoint_targets(engine._decoder.model)


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4"])
def test_the_engine_rounds_every_linear_at_each_push(weight_format: WeightFormat) -> None:
    config = moe_config(moe_intermediate_size=32, num_hidden_layers=2)
    engine = TransformersEngine(config, eos_token_ids=(), weights=ENGINE[weight_format])
    for version, seed in enumerate((0, 1)):
        weights = checkpoint(reference_model(config, seed))
        engine.load_weights(weights.items(), version)
        expected = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        plain = {name: weight.clone() for name, weight in expected.items()}
        round_linears(expected, weight_format)
        for name, held in held_by(engine).items():
            assert torch.equal(held, expected[name])
            assert torch.equal(held, plain[name]) != is_linear(name), name
    (completion,) = engine.generate(requests_of([4]), SamplingParams(max_response_tokens=3))
    assert completion.log_probs.isfinite().all()


def test_an_input_that_no_block_divides_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"down_proj\.weight: found 24 .*16"):
        TransformersEngine(moe_config(), eos_token_ids=(), weights="modelopt_nvfp4")
