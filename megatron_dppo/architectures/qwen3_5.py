"""Qwen3.5 and 3.6, dense and with experts: Qwen3-Next's layers, with four projections into linear attention.

Published models have vision. Their text model is trained and written; vision is left out.
"""

from dataclasses import replace

from megatron_dppo.architectures.family import FURTHER_LAYERS, ModelFamily
from megatron_dppo.architectures.qwen3_next import (
    HYBRID_DEFAULTS,
    HYBRID_VARIANTS,
    QWEN3_NEXT,
    SHARED_GATED_EXPERTS,
    with_linear_attention,
)
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, dense_sizes, moe_sizes
from megatron_dppo.architectures.weight_map import (
    DELTA_NET,
    DELTA_NET_SPLIT_IN_PROJ,
    DENSE_MLP,
    GATED_BACKBONE,
    OUTPUT,
)

_RULES = (*GATED_BACKBONE, OUTPUT, DELTA_NET_SPLIT_IN_PROJ, *DELTA_NET)


def _dense_sizes(hf: HFConfig) -> ModelSizes:
    return with_linear_attention(hf, dense_sizes(hf))


def _moe_sizes(hf: HFConfig) -> ModelSizes:
    shared, width = int(hf["shared_expert_intermediate_size"]), int(hf["moe_intermediate_size"])
    return with_linear_attention(hf, moe_sizes(hf, int(hf["num_experts"]), width, shared_width=shared))


QWEN3_5 = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    sizes=_dense_sizes,
    rules=(*_RULES, *DENSE_MLP),
    variants={**HYBRID_VARIANTS, "attn_output_gate": (True, True)},
    defaults={**HYBRID_DEFAULTS, "num_key_value_heads": 4, FURTHER_LAYERS: 0},
    spellings={"mtp_num_hidden_layers": FURTHER_LAYERS},
    module_names={"model.language_model.": "model."},
)
QWEN3_5_MOE: ModelFamily = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    sizes=_moe_sizes,
    rules=(*_RULES, *SHARED_GATED_EXPERTS),
    defaults={**QWEN3_5.defaults, "num_key_value_heads": 2, "num_experts_per_tok": 8},
)
