"""Llama, Mixtral, Qwen2, Qwen3 and MiniMax-M2: grouped-query attention, dense or with experts.

Llama 2 and 3 are dense, with plain or llama3 rotary frequencies. Mixtral has experts with a softmax router in
every layer. Queries, keys and values of Qwen2 and Qwen2.5 have a bias; with experts (Qwen1.5-MoE,
Qwen2-57B-A14B) they have a shared expert with a gate. Qwen3 normalises heads. MiniMax-M2 has experts with a
sigmoid router in every layer, norms over all heads, and rotates half of each head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.deepseek_v3 import router_problems, sigmoid_router
from megatron_dppo.architectures.family import (
    DEFAULTS,
    SHARED_EXPERTS_APART,
    SILU_ONLY,
    ModelFamily,
    SglangFacts,
    Variants,
    refused,
)
from megatron_dppo.architectures.sizes import (
    WIDE_NORM,
    HFConfig,
    ModelSizes,
    dense_sizes,
    moe_sizes,
    rotary_part,
)
from megatron_dppo.architectures.weight_map import (
    BACKBONE,
    DENSE_MLP,
    EXPERT_BIAS,
    MOE_MLP,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    SHARED_GATE,
    SHARED_MLP,
    WIDE_QK_NORM,
    rename,
)
from megatron_dppo.errors import Problem

SPARSE_LAYERS: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
"""transformers' default values of the keys that `sparse_layers` reads."""


def sparse_layers(hf: HFConfig) -> list[int]:
    """Return the 0-based layers that have experts."""
    dense, step = set(hf["mlp_only_layers"] or ()), int(hf["decoder_sparse_step"])
    layers = range(int(hf["num_hidden_layers"]))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    rules=(*BACKBONE, OUTPUT, *DENSE_MLP),
    variants={
        **SILU_ONLY,
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "pretraining_tp": (1, 1),
    },
    sglang=SglangFacts(drops_block_scales=True),
)
MIXTRAL_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


def _mixtral_sizes(hf: HFConfig) -> ModelSizes:
    return moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))


MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    sizes=_mixtral_sizes,
    rules=(*BACKBONE, OUTPUT, *(rename(rule, MIXTRAL_NAMES) for rule in MOE_MLP)),
    variants={**SILU_ONLY, "sliding_window": (None, None)},
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
    },
    spellings={"num_experts": "num_local_experts"},
    module_names=MIXTRAL_NAMES,
    sglang=SglangFacts(derives_head_dim=True, has_plain_rotary=True, has_own_output=True),
)

QWEN2_NAMES = {".mlp.shared_experts.": ".mlp.shared_expert."}


def _qwen2_sizes(hf: HFConfig) -> ModelSizes:
    shared, width = int(hf["shared_expert_intermediate_size"]), int(hf["moe_intermediate_size"])
    sizes = moe_sizes(hf, int(hf["num_experts"]), width, sparse_layers(hf), shared_width=shared)
    return replace(sizes, options=frozenset({SHARED_EXPERTS}))


def _qwen2_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    return {
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": not hf["norm_topk_prob"],  # weights are probabilities among all experts
    }


QWEN2_MOE = ModelFamily(
    architecture="Qwen2MoeForCausalLM",
    sizes=_qwen2_sizes,
    rules=(
        *BACKBONE,
        OUTPUT,
        *QKV_BIAS,
        *DENSE_MLP,
        *MOE_MLP,
        *(rename(rule, QWEN2_NAMES) for rule in SHARED_MLP),
        SHARED_GATE,
    ),
    variants={**SILU_ONLY, "use_sliding_window": (False, False), "qkv_bias": (True, True)},
    defaults={
        **DEFAULTS,
        **SPARSE_LAYERS,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    transformer_config=_qwen2_config,
    sglang=SglangFacts(arguments=SHARED_EXPERTS_APART, derives_head_dim=True, has_own_output=True),
)
QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    rules=(*BACKBONE, OUTPUT, *QKV_BIAS, *DENSE_MLP),
    variants={**SILU_ONLY, "use_sliding_window": (False, False)},
    defaults={**DEFAULTS, "num_key_value_heads": 32},
    sglang=SglangFacts(derives_head_dim=True),
)
_QWEN3_VARIANTS: Variants = {
    **SILU_ONLY,
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
}


def _qwen3_sizes(hf: HFConfig) -> ModelSizes:
    num_experts = int(hf.get("num_local_experts") or 0)
    sparse = sparse_layers(hf)
    if not num_experts or not sparse:
        return dense_sizes(hf)
    return moe_sizes(hf, num_experts, int(hf["moe_intermediate_size"]), sparse)


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    sizes=_qwen3_sizes,
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP, *MOE_MLP),
    variants={**_QWEN3_VARIANTS, "norm_topk_prob": (False, True)},
    defaults={**DEFAULTS, **SPARSE_LAYERS, "num_key_value_heads": 4, "num_experts_per_tok": 8},
    spellings={"num_experts": "num_local_experts"},
    sglang=SglangFacts(has_own_output=True),
)
QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP),
    variants=_QWEN3_VARIANTS,
    defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
)
_MINIMAX_BIAS = ".block_sparse_moe.e_score_correction_bias"
_UNGROUPED: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def _minimax_sizes(hf: HFConfig) -> ModelSizes:
    sizes = moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))
    rotated = rotary_part(hf, int(hf.get("rotary_dim") or sizes.head_dim) / sizes.head_dim)
    return replace(sizes, rotary_percent=rotated, options=frozenset({WIDE_NORM}))


def _minimax_problems(hf: HFConfig) -> Iterator[Problem]:
    yield from router_problems({**hf, **_UNGROUPED})
    kinds = set(hf.get("attn_type_list") or ()) - {1}
    if kinds:
        yield refused(f"attn_type_list with {sorted(kinds)}", "1, full attention, in each layer")


MINIMAX_M2 = ModelFamily(
    architecture="MiniMaxM2ForCausalLM",
    sizes=_minimax_sizes,
    rules=(
        *BACKBONE,
        OUTPUT,
        *WIDE_QK_NORM,
        *(rename(rule, MIXTRAL_NAMES) for rule in MOE_MLP),
        rename(EXPERT_BIAS, {".mlp.gate.e_score_correction_bias": _MINIMAX_BIAS}),
    ),
    variants={
        **SILU_ONLY,
        "scoring_func": ("sigmoid", "sigmoid"),
        "use_qk_norm": (True, True),
        "qk_norm_type": ("per_layer", "per_layer"),
        "use_routing_bias": (True, True),
        "shared_intermediate_size": (0, 0),
    },
    defaults={
        **DEFAULTS,
        "rope_theta": 5e6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 8,
    },
    spellings={"num_experts": "num_local_experts"},
    problems=_minimax_problems,
    rope_types=("default",),
    partial_rotary=1.0,
    transformer_config=lambda hf, sizes: sigmoid_router(_UNGROUPED),
    module_names={".mlp.e_score_correction_bias": _MINIMAX_BIAS, **MIXTRAL_NAMES},
    sglang=SglangFacts(
        has_own_output=True,
        config_keys={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    ),
)
