"""Qwen2 and Qwen2.5, dense: queries, keys and values have a bias."""

from megatron_dppo.architectures.family import DEFAULTS, SILU_ONLY, ModelFamily
from megatron_dppo.architectures.sglang_facts import SglangFacts
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP, OUTPUT, QKV_BIAS

QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    rules=(*BACKBONE, OUTPUT, *QKV_BIAS, *DENSE_MLP),
    variants={**SILU_ONLY, "use_sliding_window": (False, False)},
    defaults={**DEFAULTS, "num_key_value_heads": 32},
    sglang=SglangFacts(derives_head_dim=True),
)
