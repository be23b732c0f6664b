"""Qwen2 and Qwen2.5: queries, keys and values have a bias.

Dense, or with experts and a shared expert with a gate (Qwen1.5-MoE, Qwen2-57B-A14B).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.family import (
    DEFAULTS,
    SHARED_EXPERTS_APART,
    SILU_ONLY,
    ModelFamily,
    SglangFacts,
)
from megatron_dppo.architectures.qwen3 import SPARSE_LAYERS, sparse_layers
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, moe_sizes
from megatron_dppo.architectures.weight_map import (
    BACKBONE,
    DENSE_MLP,
    MOE_MLP,
    OUTPUT,
    QKV_BIAS,
    SHARED_EXPERTS,
    SHARED_GATE,
    SHARED_MLP,
    rename,
)

QWEN2_NAMES = {".mlp.shared_experts.": ".mlp.shared_expert."}


def _sizes(hf: HFConfig) -> ModelSizes:
    shared, width = int(hf["shared_expert_intermediate_size"]), int(hf["moe_intermediate_size"])
    sizes = moe_sizes(hf, int(hf["num_experts"]), width, sparse_layers(hf), shared_width=shared)
    return replace(sizes, options=frozenset({SHARED_EXPERTS}))


def _transformer_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    return {
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": not hf["norm_topk_prob"],  # weights are probabilities among all experts
    }


QWEN2_MOE = ModelFamily(
    architecture="Qwen2MoeForCausalLM",
    sizes=_sizes,
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
    transformer_config=_transformer_config,
    sglang=SglangFacts(arguments=SHARED_EXPERTS_APART, derives_head_dim=True, has_own_output=True),
)
QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    rules=(*BACKBONE, OUTPUT, *QKV_BIAS, *DENSE_MLP),
    variants={**SILU_ONLY, "use_sliding_window": (False, False)},
    defaults={**DEFAULTS, "num_key_value_heads": 32},
    sglang=SglangFacts(derives_head_dim=True),
)
