"""Mixtral: experts in every layer with a softmax router."""

from megatron_dppo.architectures.family import DEFAULTS, SILU_ONLY, ModelFamily, SglangFacts
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, moe_sizes
from megatron_dppo.architectures.weight_map import BACKBONE, MOE_MLP, OUTPUT, rename

NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


def _sizes(hf: HFConfig) -> ModelSizes:
    return moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))


MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    sizes=_sizes,
    rules=(*BACKBONE, OUTPUT, *(rename(rule, NAMES) for rule in MOE_MLP)),
    variants={**SILU_ONLY, "sliding_window": (None, None)},
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
    },
    spellings={"num_experts": "num_local_experts"},
    module_names=NAMES,
    sglang=SglangFacts(derives_head_dim=True, has_plain_rotary=True, has_own_output=True),
)
