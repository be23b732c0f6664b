"""Qwen3-MoE (Qwen3-30B-A3B and its kin)."""

from typing import Any

import torch.nn.functional as F

from megatron_dppo.models.family import HFConfig, ModelFamily, head_dim, moe_layers, num_experts
from megatron_dppo.models.weight_map import BACKBONE, DENSE_MLP, MOE_MLP, OUTPUT, QK_NORM


def _transformer_config(hf: HFConfig) -> dict[str, Any]:
    sparse, num_layers = moe_layers(hf), hf["num_hidden_layers"]
    all_sparse = len(sparse) == num_layers
    assert hf.get("norm_topk_prob", True), "Qwen3-MoE checkpoints normalise the chosen experts' probabilities"
    return dict(
        num_layers=num_layers,
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        num_moe_experts=num_experts(hf),
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_layer_freq=1 if all_sparse else [int(i in sparse) for i in range(num_layers)],
        moe_router_topk=hf["num_experts_per_tok"],
        # The k best logits, then a softmax over them: Hugging Face's softmax, top-k and renormalisation.
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
    )


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    transformer_config=_transformer_config,
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP, *MOE_MLP),
)
