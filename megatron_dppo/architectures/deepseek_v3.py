"""Latent attention and sigmoid routers: DeepSeek-V3 and R1, Moonlight, Kimi-K2; GLM-4.7-Flash.

The router has sigmoid scores, a bias used only for selection, and groups of experts. GLM-4.5 has it too.

transformers normalises the latents with an epsilon of 1e-6, whatever `rms_norm_eps` is in config.json. SGLang,
which samples, uses `rms_norm_eps`, and so does this package. DeepSeek-V3, R1 and Kimi-K2 have 1e-6, so there is
no difference. Moonlight and GLM-4.7-Flash have 1e-5: their logits here equal SGLang's and differ from
transformers' (by some 5e-6 of the norm for a tiny random model).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.family import (
    DEFAULTS,
    FURTHER_LAYERS,
    SHARED_EXPERTS_APART,
    SILU_ONLY,
    ModelFamily,
    SglangFacts,
    Variants,
)
from megatron_dppo.architectures.sizes import (
    HFConfig,
    LatentSizes,
    ModelSizes,
    moe_sizes,
    rope_table,
    yarn_table,
)
from megatron_dppo.architectures.weight_map import (
    DENSE_MLP,
    EXPERT_BIAS,
    LATENT_BACKBONE,
    MOE_MLP,
    NO_QUERY_RANK,
    OUTPUT,
    QUERY_RANK,
    SHARED_EXPERTS,
    SHARED_MLP,
)
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
_VARIANTS: Variants = {
    **SILU_ONLY,
    **SIGMOID_VARIANTS,
    "attention_bias": (False, False),
    "rope_interleave": (True, True),
}
_SGLANG_KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


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


def _sizes(hf: HFConfig) -> ModelSizes:
    latent = LatentSizes(
        query_rank=None if hf["q_lora_rank"] is None else int(hf["q_lora_rank"]),
        rank=int(hf["kv_lora_rank"]),
        plain_head_dim=int(hf["qk_nope_head_dim"]),
        rotary_head_dim=int(hf["qk_rope_head_dim"]),
        value_head_dim=int(hf["v_head_dim"]),
    )
    shared = shared_width(hf)
    options = {NO_QUERY_RANK if latent.query_rank is None else QUERY_RANK}
    return replace(
        moe_sizes(
            hf,
            int(hf["n_routed_experts"]),
            int(hf["moe_intermediate_size"]),
            sparse_layers(hf),
            shared_width=shared,
        ),
        head_dim=latent.plain_head_dim + latent.rotary_head_dim,
        latent=latent,
        options=frozenset(options | ({SHARED_EXPERTS} if shared else set())),
    )


def _transformer_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    latent = sizes.latent
    assert latent is not None, "the family's sizes have one"
    config: dict[str, Any] = dict(
        multi_latent_attention=True,
        qk_layernorm=True,  # the latents' norms
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.rank,
        qk_head_dim=latent.plain_head_dim,
        qk_pos_emb_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        kv_channels=latent.value_head_dim,
        num_query_groups=sizes.num_attention_heads,
        rotary_base=sizes.rope_theta,
        rope_type="rope",
    )
    yarn = yarn_table(hf)
    if yarn is not None:
        config |= dict(
            rope_type="yarn",
            rotary_scaling_factor=yarn["factor"],
            original_max_position_embeddings=yarn["original_max_position_embeddings"],
            beta_fast=yarn.get("beta_fast") or 32,
            beta_slow=yarn.get("beta_slow") or 1,
            mscale=yarn["mscale"],
            mscale_all_dim=yarn["mscale_all_dim"],
        )
    return {**config, **sigmoid_router(hf)}


def _problems(hf: HFConfig) -> Iterator[Problem]:
    yield from router_problems(hf)
    truncate = rope_table(hf).get("truncate", True)
    if truncate is not True:
        found, action = f"YaRN with truncate = {truncate!r} in config.json", "Use another model."
        yield Problem("model.load", found, "True: Megatron's latent attention has no option for it", action)
    heads, of_keys = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if of_keys is not None and of_keys != heads:
        action = "Use a config.json as its publisher wrote it."
        found = f"num_key_value_heads = {of_keys} in config.json"
        yield Problem(
            "model.load", found, f"{heads}, num_attention_heads: latents give each head its own", action
        )


def _family(architecture: str, defaults: Mapping[str, Any], sglang: SglangFacts) -> ModelFamily:
    """Build a family; `defaults` are transformers' values that differ from `SIGMOID_DEFAULTS`."""
    return ModelFamily(
        architecture=architecture,
        sizes=_sizes,
        rules=(*LATENT_BACKBONE, OUTPUT, *DENSE_MLP, *MOE_MLP, EXPERT_BIAS, *SHARED_MLP),
        variants=_VARIANTS,
        defaults={**SIGMOID_DEFAULTS, **defaults},
        spellings=SIGMOID_SPELLINGS,
        problems=_problems,
        rope_types=("default", "yarn"),
        transformer_config=_transformer_config,
        sglang=sglang,
    )


_SGLANG = SglangFacts(has_dense_layers=True, arguments=SHARED_EXPERTS_APART)
DEEPSEEK_V3 = _family(
    "DeepseekV3ForCausalLM",
    {
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "num_key_value_heads": None,
    },
    replace(_SGLANG, config_keys=_SGLANG_KEYS),
)
GLM4_MOE_LITE = _family(
    "Glm4MoeLiteForCausalLM",
    {
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "num_key_value_heads": None,
    },
    replace(_SGLANG, has_own_output=True),
)
