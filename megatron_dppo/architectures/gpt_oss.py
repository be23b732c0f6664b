"""gpt-oss: attention sinks, windows in every other layer, YaRN, and biases in attention, routers and experts.

A sink is a learned score of each head, for which no value is added. Experts clamp the gate from above and the
up projection on both sides, and compute `(up + 1) * gate * sigmoid(1.702 * gate)`. Checkpoints stack the
experts of a layer in one tensor, and publishers store them as MXFP4 (`published_names.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.architectures.family import DEFAULTS, ROPE, SILU_ONLY, ModelFamily, SglangFacts
from megatron_dppo.architectures.sizes import (
    BIASED_EXPERTS,
    BIASED_OUTPUT,
    SINKS,
    HFConfig,
    ModelSizes,
    moe_sizes,
)
from megatron_dppo.architectures.weight_map import (
    BACKBONE,
    MEGATRON_LAYER,
    MOE_MLP,
    OUTPUT,
    QKV_BIAS,
    layer_rule,
    rename,
)
from megatron_dppo.errors import Problem

FULL, WINDOWED = "full_attention", "sliding_attention"
_NAMES = {".mlp.gate.": ".mlp.router."}
_SINKS = layer_rule("self_attention.core_attention.softmax_offset", "self_attn.sinks", "T", 0, only_with=SINKS)
_ATTENTION_BIASES = (
    *(replace(rule, only_with=BIASED_OUTPUT) for rule in QKV_BIAS),
    layer_rule("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "H", only_with=BIASED_OUTPUT),
)
_SPARSE: dict[str, Any] = {"layers": "sparse", "only_with": BIASED_EXPERTS}
_ROUTER_BIAS = layer_rule("mlp.router.bias", "mlp.router.bias", "E", **_SPARSE)
_EXPERTS_BIASES = (
    layer_rule(
        "mlp.experts.fc1_bias",
        [f"mlp.experts.{{expert}}.{name}_proj.bias" for name in ("gate", "up")],
        "F",
        0,
        fusion="concatenate",
        is_expert=True,
        transformer_engine=MEGATRON_LAYER + "mlp.experts.linear_fc1.bias{local}",
        **_SPARSE,
    ),
    layer_rule(
        "mlp.experts.fc2_bias",
        "mlp.experts.{expert}.down_proj.bias",
        "H",
        is_expert=True,
        transformer_engine=MEGATRON_LAYER + "mlp.experts.linear_fc2.bias{local}",
        **_SPARSE,
    ),
)


def windows(hf: HFConfig) -> list[bool]:
    """Return whether each layer has a window, from a completed config.json: by default the 1st, 3rd, ..."""
    num_layers, kinds = int(hf["num_hidden_layers"]), hf["layer_types"]
    if kinds:
        return [kind == WINDOWED for kind in kinds[:num_layers]]
    return [layer % 2 == 0 for layer in range(num_layers)]


def _sizes(hf: HFConfig) -> ModelSizes:
    sizes = moe_sizes(hf, int(hf["num_local_experts"]), int(hf["intermediate_size"]))
    options = {SINKS, BIASED_EXPERTS} | ({BIASED_OUTPUT} if hf["attention_bias"] else set())
    return replace(sizes, options=frozenset(options))


def _transformer_config(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    return {
        "softmax_type": "learnable",
        "window_size": (int(hf["sliding_window"]) - 1, 0),  # Megatron's counts keys before the query
        "window_attn_skip_freq": [int(has_window) for has_window in windows(hf)],
        "activation_func_clamp_value": float(hf["swiglu_limit"]),
    }


def _problems(hf: HFConfig) -> Iterator[Problem]:
    action = "Use a model of the supported variant; another one would be trained wrongly."
    if int(hf["num_experts_per_tok"]) == 1:
        found = "num_experts_per_tok = 1 in config.json"
        yield Problem("model.load", found, "at least 2: a softmax over one logit is 1", action)
    kinds, num_layers = hf["layer_types"], hf.get("num_hidden_layers")
    if kinds and num_layers is not None and len(kinds) < num_layers:
        found = f"layer_types of {len(kinds)} layers in config.json"
        yield Problem("model.load", found, f"at least num_hidden_layers, {num_layers}", action)
    for key in ("sliding_window", "swiglu_limit"):
        if not hf[key] > 0:
            yield Problem("model.load", f"{key} = {hf[key]!r} in config.json", "a number above 0", action)


GPT_OSS = ModelFamily(
    architecture="GptOssForCausalLM",
    sizes=_sizes,
    rules=(
        *BACKBONE,
        OUTPUT,
        *_ATTENTION_BIASES,
        _SINKS,
        *(rename(rule, _NAMES) for rule in MOE_MLP),
        _ROUTER_BIAS,
        *_EXPERTS_BIASES,
    ),
    variants={**SILU_ONLY, "swiglu_alpha": (1.702, 1.702)},
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "swiglu_limit": 7.0,
        ROPE: {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    spellings={"num_experts": "num_local_experts"},
    problems=_problems,
    rope_types=("yarn",),
    layer_types=(FULL, WINDOWED),
    has_interleaved_stacks=True,
    transformer_config=_transformer_config,
    module_names=_NAMES,
    sglang=SglangFacts(has_own_output=True),
)
