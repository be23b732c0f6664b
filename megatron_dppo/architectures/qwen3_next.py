"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, experts in every layer.

A shared expert has a gate, norms multiply by 1 + weight, and a quarter of each head is rotated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.family import (
    DEFAULTS,
    SHARED_EXPERTS_APART,
    SILU_ONLY,
    ModelFamily,
    SglangFacts,
    Variants,
)
from megatron_dppo.architectures.qwen2 import QWEN2_NAMES
from megatron_dppo.architectures.qwen3 import SPARSE_LAYERS, sparse_layers
from megatron_dppo.architectures.sizes import (
    OUTPUT_GATE,
    ZERO_CENTRED,
    HFConfig,
    LinearSizes,
    ModelSizes,
    dense_sizes,
    moe_sizes,
    rotary_part,
)
from megatron_dppo.architectures.weight_map import (
    DELTA_NET,
    DELTA_NET_IN_PROJ,
    DENSE_MLP,
    GATED_BACKBONE,
    MOE_MLP,
    OUTPUT,
    SHARED_EXPERTS,
    SHARED_GATE,
    SHARED_MLP,
    rename,
)
from megatron_dppo.errors import Problem

LINEAR, SOFTMAX = "linear_attention", "full_attention"
QUARTER = 0.25
HYBRID_VARIANTS: Variants = {**SILU_ONLY, "attention_bias": (False, False)}
HYBRID_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""transformers' values of keys that config.json leaves out, common to Qwen3-Next and Qwen3.5."""


def layer_kinds(hf: HFConfig) -> Sequence[str]:
    """Return `layer_types` of a config.json, or what transformers derives from `full_attention_interval`."""
    num_layers, kinds = int(hf["num_hidden_layers"]), hf.get("layer_types")
    if kinds:
        return kinds[:num_layers]
    period = int(hf["full_attention_interval"])
    return [LINEAR if (layer + 1) % period else SOFTMAX for layer in range(num_layers)]


def with_linear_attention(hf: HFConfig, sizes: ModelSizes) -> ModelSizes:
    """Return the sizes with the sizes of linear attention, and the options of these families."""
    linear = LinearSizes(
        layers=tuple(layer for layer, kind in enumerate(layer_kinds(hf)) if kind == LINEAR),
        num_key_heads=int(hf["linear_num_key_heads"]),
        num_value_heads=int(hf["linear_num_value_heads"]),
        key_head_dim=int(hf["linear_key_head_dim"]),
        value_head_dim=int(hf["linear_value_head_dim"]),
        conv_width=int(hf["linear_conv_kernel_dim"]),
    )
    options = {ZERO_CENTRED, OUTPUT_GATE} | ({SHARED_EXPERTS} if sizes.moe_layers else set[str]())
    return replace(sizes, linear=linear, rotary_percent=rotary_part(hf, QUARTER), options=frozenset(options))


def hybrid_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    """Return keywords of Megatron's TransformerConfig."""
    linear = sizes.linear
    assert linear is not None
    return {
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer in linear.layers) for layer in range(sizes.num_layers)],
        "linear_conv_kernel_dim": linear.conv_width,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        **({"moe_shared_expert_gate": True} if sizes.moe_layers else {}),
    }


def hybrid_problems(hf: HFConfig) -> Iterator[Problem]:
    """Yield the problems of the layers' kinds and of the heads of linear attention."""
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    action = "Use a config.json as its publisher wrote it."
    if values % keys:
        found = f"linear_num_value_heads = {values} with linear_num_key_heads = {keys} in config.json"
        yield Problem("model.load", found, "a multiple of the key heads", action)
    if hf.get("output_gate_type") not in (None, "silu", "swish"):
        found = f"output_gate_type = {hf['output_gate_type']!r} in config.json"
        yield Problem("model.load", found, "'silu'", "Use a model of the supported variant.")
    if "num_hidden_layers" not in hf:  # which reading the sizes reports
        return
    kinds, num_layers = layer_kinds(hf), hf["num_hidden_layers"]
    if len(kinds) < num_layers:
        found = f"layer_types of {len(kinds)} layers in config.json"
        yield Problem("model.load", found, f"one for each of {num_layers} layers", action)
    elif len(set(kinds)) == 1:
        found = f"{kinds[0]} in all {num_layers} layers"
        yield Problem("model.load", found, f"{LINEAR} in some layers and {SOFTMAX} in others", action)


def _sizes(hf: HFConfig) -> ModelSizes:
    sparse, num_experts = sparse_layers(hf), int(hf["num_experts"])
    if not sparse or not num_experts:
        return with_linear_attention(hf, dense_sizes(hf))
    shared, width = int(hf["shared_expert_intermediate_size"]), int(hf["moe_intermediate_size"])
    sizes = moe_sizes(hf, num_experts, width, sparse, shared_width=shared)
    return with_linear_attention(hf, sizes)


SHARED_GATED_EXPERTS = (*MOE_MLP, *(rename(rule, QWEN2_NAMES) for rule in SHARED_MLP), SHARED_GATE)
QWEN3_NEXT = ModelFamily(
    architecture="Qwen3NextForCausalLM",
    sizes=_sizes,
    rules=(*GATED_BACKBONE, OUTPUT, DELTA_NET_IN_PROJ, *DELTA_NET, *DENSE_MLP, *SHARED_GATED_EXPERTS),
    variants={**HYBRID_VARIANTS, "norm_topk_prob": (True, True)},
    defaults={**HYBRID_DEFAULTS, **SPARSE_LAYERS, "num_key_value_heads": 2, "num_experts_per_tok": 10},
    problems=hybrid_problems,
    layer_types=(SOFTMAX, LINEAR),
    rope_types=("default",),
    partial_rotary=QUARTER,
    transformer_config=hybrid_config,
    sglang=SglangFacts(arguments=SHARED_EXPERTS_APART, has_own_output=True),
)
