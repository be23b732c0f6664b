"""8-bit floats with block scales: rounding, the linears that have them, and their order in a push."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import dequantized
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.block_fp8 import BlockFP8, quantize_blocks, round_groups
from megatron_dppo.engines.weight_sync.factory import ChangedWeights
from tests.support.plan_models import QWEN3_30B

EXPERT = "model.layers.7.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("is_power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 129)])
def test_a_block_is_rounded_to_its_largest_value(shape: tuple[int, int], is_power_of_two: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] *= 1e-3
    values, scales = quantize_blocks(weight, is_power_of_two=is_power_of_two)
    assert (values.dtype, values.shape, scales.dtype) == (torch.float8_e4m3fn, shape, torch.float32)
    assert scales.shape == tuple(-(-size // 128) for size in shape)
    rounded = dequantized(values, scales).float()
    assert ((rounded - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-9).all()
    small = (rounded - weight)[:128, :128].abs().max()
    assert small <= weight[:128, :128].abs().max() / 16 * 1.05  # its own scale, whatever the others are
    if is_power_of_two:
        assert (torch.frexp(scales)[0] == 0.5).all()


def test_zeros_and_the_largest_values_survive() -> None:
    weight = torch.zeros(256, 128)
    weight[200] = torch.linspace(-1e38, 1e38, 128)
    values, scales = quantize_blocks(weight)
    assert not values.float().isnan().any() and scales.isfinite().all()
    assert (values[:128].float() == 0).all() and values[200].float().abs().max() == 448


@pytest.mark.parametrize(("largest", "taken_for"), [(2e-4, 2e-4), (1.1e-4, 1.1e-4), (6e-5, 1e-4), (0.0, 1e-4)])
def test_block_maximum_is_at_least_a_ten_thousandth(largest: float, taken_for: float) -> None:
    _, scales = quantize_blocks(torch.linspace(-largest, 0, 128 * 128).view(128, 128))
    torch.testing.assert_close(scales, torch.tensor([[taken_for / 448]]))


def test_inputs_are_rounded_in_groups_of_a_token() -> None:
    inputs = torch.randn(2, 3, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    inputs[0, 0, :128] *= 1000
    rounded = round_groups(inputs)
    assert rounded.dtype == inputs.dtype and rounded.shape == inputs.shape
    error = (rounded.float() - inputs.float()).abs()
    assert 0 < error[0, 0, 128:].max() < 0.3 < error[0, 0, :128].max()


@pytest.mark.parametrize(
    ("ignored", "name", "is_quantised"),
    [
        ((), EXPERT, True),
        ((), "model.layers.0.mlp.gate.weight", False),
        ((), "model.layers.0.mlp.shared_expert_gate.weight", False),
        ((), "model.layers.0.self_attn.q_norm.weight", False),
        ((), "model.layers.0.self_attn.q_proj.bias", False),
        ((), "lm_head.weight", False),
        ((), "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ((), "model.layers.0.block_sparse_moe.experts.1.w2.weight", True),
        (("mlp.gate",), "model.layers.0.mlp.gate_proj.weight", True),
        (("model.layers.1",), "model.layers.1.self_attn.q_proj.weight", False),
        (("model.layers.1",), "model.layers.10.self_attn.q_proj.weight", True),
        (("layers.1.self_attn.q_proj",), "model.layers.1.self_attn.q_proj.weight", False),
        (("model.layers.7.mlp.experts",), EXPERT, False),
        (("model.layers.7.mlp.experts.0.gate_proj",), EXPERT, False),  # all experts or none
        (("model.layers.7.mlp.shared_experts",), EXPERT, True),
    ],
)
def test_linears_are_quantised_unless_the_folder_names_them(
    ignored: tuple[str, ...], name: str, is_quantised: bool
) -> None:
    """As in SGLang: `tests/sglang/test_pushed_fp8.py` compares some of these."""
    assert BlockFP8(ignored).quantizes(name) == is_quantised


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_the_form_is_read_from_config_json(key: str) -> None:
    table: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    form = BlockFP8.of({"quantization_config": table | {key: ["a", "b"]}})
    expected = BlockFP8(("a", "b"), is_power_of_two=True)
    assert form == BlockFP8.of({"quantization_config": expected.described()}) == expected
    assert BlockFP8.of({"quantization_config": table | {"weight_block_size": [1, 32]}}) is None
    assert BlockFP8.of({}) is None


class Owner:
    """An owner of weights, whose ranks call it together."""

    log_probs = None
    pipeline_place = (0, 1, True)

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors, self.num_calls = tensors, 0

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self.num_calls += 1
        return iter(self._tensors.items())

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in self._tensors.items()}


def test_a_push_sends_what_it_describes_and_calls_the_owner_at_once() -> None:
    family = FAMILIES["Qwen3MoeForCausalLM"]
    sizes = {
        "hidden_size": 64,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "vocab_size": 40_000,
    }
    shapes = family.hf_shapes(QWEN3_30B | sizes | {"num_hidden_layers": 6})
    owner = Owner({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    changed = ChangedWeights(owner, BlockFP8(("model.layers.2.self_attn",)).quantized)
    stream = changed.weights()
    assert owner.num_calls == 1  # before anything is read: other ranks may read at another time
    sent = dict(stream)
    described = changed.describe_weights()
    assert {n: (t.dtype, t.shape) for n, t in sent.items()} == {
        n: (t.dtype, t.shape) for n, t in described.items()
    }
    assert sent.keys() - shapes.keys() == {f"{n}_scale_inv" for n, t in sent.items() if t.itemsize == 1}
    dtypes = [dtype for dtype, _ in groupby(sent.values(), lambda tensor: tensor.dtype)]
    assert len(dtypes) == 4  # embedding; linears; output layer and small ones; scales
