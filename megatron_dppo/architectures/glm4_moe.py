"""GLM-4.5 and GLM-4.6, with and without "Air": experts with a sigmoid router, half of each head rotated."""

from dataclasses import replace

from megatron_dppo.architectures.deepseek_v3 import (
    SIGMOID_DEFAULTS,
    SIGMOID_SPELLINGS,
    SIGMOID_VARIANTS,
    router_problems,
    shared_width,
    sigmoid_router,
    sparse_layers,
)
from megatron_dppo.architectures.family import SHARED_EXPERTS_APART, SILU_ONLY, ModelFamily, SglangFacts
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, moe_sizes, rotary_part
from megatron_dppo.architectures.weight_map import (
    BACKBONE,
    DENSE_MLP,
    EXPERT_BIAS,
    MOE_MLP,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    SHARED_MLP,
)

_BIAS, _NORM = "attention_bias", "use_qk_norm"
_HALF = 0.5


def _sizes(hf: HFConfig) -> ModelSizes:
    width, shared = int(hf["moe_intermediate_size"]), shared_width(hf)
    sizes = moe_sizes(hf, int(hf["n_routed_experts"]), width, sparse_layers(hf), shared_width=shared)
    options = {key for key in (_BIAS, _NORM) if hf[key]} | ({SHARED_EXPERTS} if shared else set[str]())
    return replace(sizes, rotary_percent=rotary_part(hf, _HALF), options=frozenset(options))


GLM4_MOE = ModelFamily(
    architecture="Glm4MoeForCausalLM",
    sizes=_sizes,
    rules=(
        *BACKBONE,
        OUTPUT,
        *(replace(rule, only_with=_BIAS) for rule in QKV_BIAS),
        *(replace(rule, only_with=_NORM) for rule in QK_NORM),
        *DENSE_MLP,
        *MOE_MLP,
        EXPERT_BIAS,
        *SHARED_MLP,
    ),
    variants={**SILU_ONLY, **SIGMOID_VARIANTS},
    defaults={
        **SIGMOID_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        _BIAS: False,
        _NORM: False,
    },
    spellings=SIGMOID_SPELLINGS,
    problems=router_problems,
    rope_types=("default",),
    partial_rotary=_HALF,
    transformer_config=lambda hf, sizes: sigmoid_router(hf),
    sglang=SglangFacts(has_dense_layers=True, has_own_output=True, arguments=SHARED_EXPERTS_APART),
)
