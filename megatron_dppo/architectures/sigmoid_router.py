"""Routers of DeepSeek-V3's kind: sigmoid scores, a bias that only chooses, groups of experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_dppo.architectures.family import Variants
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.errors import Problem

SIGMOID_VARIANTS: Variants = {
    "norm_topk_prob": (True, True),
    "scoring_func": ("sigmoid", "sigmoid"),
    "topk_method": ("noaux_tc", "noaux_tc"),
    "moe_layer_freq": (1, 1),
}


def sparse_layers(hf: HFConfig, first_sparse: int) -> list[int]:
    """Return the 0-based layers that have experts.

    Args:
        hf: config.json, with `mlp_layer_types` or `first_k_dense_replace`.
        first_sparse: Number of dense layers in front where it has neither.
    """
    num_layers, kinds = int(hf["num_hidden_layers"]), hf.get("mlp_layer_types")
    if kinds:
        return [layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "sparse"]
    given = hf.get("first_k_dense_replace")
    return list(range(first_sparse if given is None else int(given), num_layers))


def sigmoid_router(hf: HFConfig, default_groups: tuple[int, int] = (1, 1)) -> Mapping[str, Any]:
    """Return keywords of Megatron's TransformerConfig.

    The bias stays the checkpoint's unless [megatron] moe_router_bias_update_rate moves it.

    Args:
        hf: config.json.
        default_groups: transformers' `n_group` and `topk_group` where it has none.
    """
    groups, best = _groups(hf, default_groups)
    is_limited = best < groups
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,
        moe_router_num_groups=groups if is_limited else None,
        moe_router_group_topk=best if is_limited else None,
        moe_router_topk_scaling_factor=float(hf.get("routed_scaling_factor") or 1.0),
    )


def router_problems(hf: HFConfig, default_groups: tuple[int, int] = (1, 1)) -> Iterator[Problem]:
    """Yield what Megatron's router would compute otherwise; arguments as those of `sigmoid_router`."""
    groups, best = _groups(hf, default_groups)
    top_k = int(hf.get("num_experts_per_tok") or 8)
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


def _groups(hf: HFConfig, default: tuple[int, int]) -> tuple[int, int]:
    found = (hf.get("n_group", default[0]), hf.get("topk_group", default[1]))
    groups, best = (int(number or 1) for number in found)
    return groups, best


def shared_width(hf: HFConfig, default_experts: int = 1) -> int:
    """Return the width of all shared experts together."""
    return int(hf.get("n_shared_experts", default_experts) or 0) * int(hf["moe_intermediate_size"])
