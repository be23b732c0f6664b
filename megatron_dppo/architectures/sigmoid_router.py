"""Routers like DeepSeek-V3's: sigmoid scores, a bias used only for selection, groups of experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.architectures.family import DEFAULTS, FURTHER_LAYERS, Variants
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.errors import Problem

SIGMOID_VARIANTS: Variants = {
    "norm_topk_prob": (True, True),
    "scoring_func": ("sigmoid", "sigmoid"),
    "topk_method": ("noaux_tc", "noaux_tc"),
    "moe_layer_freq": (1, 1),
}


SIGMOID_SPELLINGS = {"num_local_experts": "n_routed_experts", "num_mtp_layers": FURTHER_LAYERS}
"""Other names of keys that transformers' config classes accept."""
SIGMOID_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": None,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    FURTHER_LAYERS: 1,
}
"""GLM-4.5's values of keys that config.json leaves out; other families override some."""


def sparse_layers(hf: HFConfig) -> list[int]:
    """Return the 0-based layers that have experts.

    Args:
        hf: Content of config.json. `mlp_layer_types` takes precedence over `first_k_dense_replace`, which may
            then be null.
    """
    num_layers, kinds = int(hf["num_hidden_layers"]), hf["mlp_layer_types"]
    if kinds:
        return [layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "sparse"]
    return list(range(int(hf["first_k_dense_replace"]), num_layers))


def sigmoid_router(hf: HFConfig) -> Mapping[str, Any]:
    """Return keywords of Megatron's TransformerConfig.

    The bias keeps the checkpoint's value unless [megatron] moe_router_bias_update_rate updates it.
    """
    groups, best = int(hf["n_group"]), int(hf["topk_group"])
    is_limited = best < groups
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=groups if is_limited else None,
        moe_router_group_topk=best if is_limited else None,
        moe_router_topk_scaling_factor=float(hf["routed_scaling_factor"]),
    )


def router_problems(hf: HFConfig) -> Iterator[Problem]:
    """Yield the problems of a completed config.json: values that Megatron's router treats differently."""
    groups, best = int(hf["n_group"]), int(hf["topk_group"])
    top_k = int(hf["num_experts_per_tok"])
    action = "Use a model of the supported variant; another one would be trained wrongly."
    if top_k == 1:
        found = "num_experts_per_tok = 1 in config.json"
        yield Problem("model.load", found, "at least 2: Megatron does not normalise a single weight", action)
    if best < groups and top_k // best != 2:
        found = f"topk_group = {best} of n_group = {groups} with num_experts_per_tok = {top_k} in config.json"
        expected = (
            "twice as many experts as groups: Megatron ranks a group by its top_k // topk_group best experts,"
        )
        yield Problem("model.load", found, f"{expected} transformers by two", action)


def shared_width(hf: HFConfig) -> int:
    """Return the total width of all shared experts."""
    return int(hf["n_shared_experts"]) * int(hf["moe_intermediate_size"])
