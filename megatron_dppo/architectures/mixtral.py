"""Mixtral: experts in every layer behind a softmax router."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.family import SILU_ONLY, ModelFamily
from megatron_dppo.architectures.sglang_facts import SglangFacts
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes, moe_sizes
from megatron_dppo.architectures.weight_map import BACKBONE, MOE_MLP, OUTPUT, WeightRule

_NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


def _sizes(hf: HFConfig) -> ModelSizes:
    sizes = moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))
    is_said = "rope_theta" in hf or "rope_theta" in (hf.get("rope_parameters") or {})
    return sizes if is_said else replace(sizes, rope_theta=1e6)


def _transformer_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    return {"layernorm_epsilon": hf.get("rms_norm_eps", 1e-5)}


def _renamed(rule: WeightRule) -> WeightRule:
    names = rule.hf
    for ours, theirs in _NAMES.items():
        names = tuple(name.replace(ours, theirs) for name in names)
    return replace(rule, hf=names)


MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    sizes=_sizes,
    rules=(*BACKBONE, OUTPUT, *map(_renamed, MOE_MLP)),
    variants={**SILU_ONLY, "sliding_window": (None, None)},
    transformer_config=_transformer_config,
    module_names=_NAMES,
    sglang=SglangFacts(
        derives_head_dim=True, has_plain_rotary=True, has_own_output=True, lacks_routes=("0.5.21",)
    ),
)
