"""MiniMax-M2: experts with a sigmoid router in every layer, norms over all heads, half of each head rotated."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.deepseek_v3 import router_problems, sigmoid_router
from megatron_dppo.architectures.family import DEFAULTS, SILU_ONLY, ModelFamily, SglangFacts
from megatron_dppo.architectures.mixtral import NAMES as MIXTRAL_NAMES
from megatron_dppo.architectures.sizes import WIDE_NORM, HFConfig, ModelSizes, moe_sizes, rotary_part
from megatron_dppo.architectures.weight_map import (
    BACKBONE,
    EXPERT_BIAS,
    MOE_MLP,
    OUTPUT,
    WIDE_QK_NORM,
    rename,
)
from megatron_dppo.errors import Problem

_BIAS = ".block_sparse_moe.e_score_correction_bias"
_UNGROUPED: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}


def _sizes(hf: HFConfig) -> ModelSizes:
    sizes = moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))
    rotated = rotary_part(hf, int(hf.get("rotary_dim") or sizes.head_dim) / sizes.head_dim)
    return replace(sizes, rotary_percent=rotated, options=frozenset({WIDE_NORM}))


def _problems(hf: HFConfig) -> Iterator[Problem]:
    yield from router_problems({**hf, **_UNGROUPED})
    kinds = set(hf.get("attn_type_list") or ()) - {1}
    if kinds:
        found, expected = (
            f"attn_type_list with {sorted(kinds)} in config.json",
            "1, full attention, in each layer",
        )
        action = "Use a model of the supported variant; another one would be trained wrongly."
        yield Problem("model.load", found, expected, action)


MINIMAX_M2 = ModelFamily(
    architecture="MiniMaxM2ForCausalLM",
    sizes=_sizes,
    rules=(
        *BACKBONE,
        OUTPUT,
        *WIDE_QK_NORM,
        *(rename(rule, MIXTRAL_NAMES) for rule in MOE_MLP),
        rename(EXPERT_BIAS, {".mlp.gate.e_score_correction_bias": _BIAS}),
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
    problems=_problems,
    rope_types=("default",),
    partial_rotary=1.0,
    transformer_config=lambda hf, sizes: sigmoid_router(_UNGROUPED),
    module_names={".mlp.e_score_correction_bias": _BIAS, **MIXTRAL_NAMES},
    sglang=SglangFacts(
        has_own_output=True,
        config_keys={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    ),
)
