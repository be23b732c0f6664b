"""Qwen3: dense, and with experts (Qwen3-30B-A3B and its kin)."""

from typing import Any

from megatron_dppo.architectures.family import SILU_ONLY, HFConfig, ModelFamily, Variants, backbone_config
from megatron_dppo.architectures.layout import model_sizes
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP, MOE_MLP, OUTPUT, QK_NORM

_VARIANTS: Variants = {
    **SILU_ONLY,
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
}


def _dense_config(hf: HFConfig) -> dict[str, Any]:
    return backbone_config(hf) | dict(qk_layernorm=True)


def _moe_config(hf: HFConfig) -> dict[str, Any]:
    sizes = model_sizes(hf)
    all_sparse = len(sizes.moe_layers) == sizes.num_layers
    return _dense_config(hf) | dict(
        num_moe_experts=sizes.num_experts,
        moe_ffn_hidden_size=sizes.moe_intermediate_size,
        moe_layer_freq=1 if all_sparse else [int(i in sizes.moe_layers) for i in range(sizes.num_layers)],
        moe_router_topk=sizes.experts_per_token,
        # The k best logits, then a softmax over them: Hugging Face's softmax, top-k and renormalisation.
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
    )


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    transformer_config=_moe_config,
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP, *MOE_MLP),
    variants={**_VARIANTS, "norm_topk_prob": (False, True)},
)
QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    transformer_config=_dense_config,
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP),
    variants=_VARIANTS,
)
