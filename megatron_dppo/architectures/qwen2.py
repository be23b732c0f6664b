"""Qwen2 and Qwen2.5, dense: queries, keys and values have a bias."""

from typing import Any

from megatron_dppo.architectures.family import SILU_ONLY, HFConfig, ModelFamily, backbone_config
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP, OUTPUT, QKV_BIAS


def _transformer_config(hf: HFConfig) -> dict[str, Any]:
    return backbone_config(hf) | dict(add_qkv_bias=True)


QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    transformer_config=_transformer_config,
    rules=(*BACKBONE, OUTPUT, *QKV_BIAS, *DENSE_MLP),
    variants={**SILU_ONLY, "use_sliding_window": (False, False)},
)
