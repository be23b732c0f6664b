"""Qwen3: dense, and with experts (Qwen3-30B-A3B and similar models)."""

from collections.abc import Mapping
from typing import Any

from megatron_dppo.architectures.family import DEFAULTS, SILU_ONLY, ModelFamily, SglangFacts, Variants
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, dense_sizes, moe_sizes
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP, MOE_MLP, OUTPUT, QK_NORM

_VARIANTS: Variants = {
    **SILU_ONLY,
    "attention_bias": (False, False),
    "use_sliding_window": (False, False),
}


SPARSE_LAYERS: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
"""transformers' default values of the keys that `sparse_layers` reads."""


def sparse_layers(hf: HFConfig) -> list[int]:
    """Return the 0-based layers that have experts."""
    dense, step = set(hf["mlp_only_layers"] or ()), int(hf["decoder_sparse_step"])
    layers = range(int(hf["num_hidden_layers"]))
    return [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]


def _moe_sizes(hf: HFConfig) -> ModelSizes:
    num_experts = int(hf.get("num_local_experts") or 0)
    sparse = sparse_layers(hf)
    if not num_experts or not sparse:
        return dense_sizes(hf)
    return moe_sizes(hf, num_experts, int(hf["moe_intermediate_size"]), sparse)


QWEN3_MOE = ModelFamily(
    architecture="Qwen3MoeForCausalLM",
    sizes=_moe_sizes,
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP, *MOE_MLP),
    variants={**_VARIANTS, "norm_topk_prob": (False, True)},
    defaults={**DEFAULTS, **SPARSE_LAYERS, "num_key_value_heads": 4, "num_experts_per_tok": 8},
    spellings={"num_experts": "num_local_experts"},
    sglang=SglangFacts(has_own_output=True),
)
QWEN3 = ModelFamily(
    architecture="Qwen3ForCausalLM",
    rules=(*BACKBONE, OUTPUT, *QK_NORM, *DENSE_MLP),
    variants=_VARIANTS,
    defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
)
