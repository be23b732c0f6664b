"""Rules about the `[megatron]` pass-through table, without importing Megatron here.

Names of `TransformerConfig` fields are read in a subprocess and cached per version of megatron-core.
"""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator

from megatron_dppo.cache import cache_folder, write_json
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.load import did_you_mean
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem

_PRINT_FIELDS = """
import dataclasses, json
from megatron.core.transformer.transformer_config import TransformerConfig
print(json.dumps([field.name for field in dataclasses.fields(TransformerConfig) if field.name[0] != "_"]))
"""
_FROM_MODEL = "the model's config.json (model.load)"
_BY_TRAINER = "the training loop, which depends on it"
_BY_PACKING = "packing: ranks hold different numbers of tokens, which only alltoall exchanges"
_PROVEN_STAGES = "parallel.pipeline: stages of equally many layers, which is what was compared with one process"
_PROVEN_CONTEXT = "parallel.context: gathered keys and values, which is what was compared with one process"
_OWNED: dict[str, str] = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.tensor (on whenever it is above 1)",
    "moe_enable_routing_replay": "rollout.routing_replay",
    "moe_token_dispatcher_type": _BY_PACKING,
    **dict.fromkeys(
        (
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"),
        ),
        _PROVEN_STAGES,
    ),
    **dict.fromkeys(("hierarchical_context_parallel_sizes", "cp_comm_type"), _PROVEN_CONTEXT),
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "autocast_dtype", "bf16", "fp16", "fp8", "fp4"), "model.dtype"
    ),
    **dict.fromkeys(
        ("transformer_impl", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm", "use_kitchen"),
        "model.layer_spec",
    ),
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "normalization", "layernorm_epsilon", "qk_layernorm", "gated_linear_unit"),
            *("activation_func", "add_bias_linear", "add_qkv_bias", "rotary_interleaved", "softmax_scale"),
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq"),
            *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_topk_scaling_factor"),
            *("moe_shared_expert_intermediate_size", "multi_latent_attention", "mtp_num_layers"),
        ),
        _FROM_MODEL,
    ),
    **dict.fromkeys(
        (
            *("calculate_per_token_loss", "variable_seq_lengths", "hidden_dropout", "attention_dropout"),
            *("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device"),
            *("overlap_p2p_comm", "batch_p2p_comm", "finalize_model_grads_func", "grad_scale_func"),
            *("no_sync_func", "grad_sync_func", "param_sync_func", "timers"),
        ),
        _BY_TRAINER,
    ),
}
"""TransformerConfig fields that the package sets, and what decides them."""


@rule("megatron_names")
def _megatron_names(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [megatron] are TransformerConfig fields."""
    known = megatron_fields() if config.megatron else None
    for key in config.megatron:
        if known is not None and key not in known:
            guess = did_you_mean(key, sorted(known - _OWNED.keys()))
            action = f"Did you mean megatron.{guess}?" if guess else "Remove it."
            yield Problem(f"megatron.{key}", key, "a field of Megatron's TransformerConfig", action)


@rule("megatron_owned")
def _megatron_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[megatron] leaves alone what the package sets."""
    for key in config.megatron:
        if key in _OWNED:
            found = f"{key} = {config.megatron[key]!r}"
            action = f"Remove it from [megatron]; it is set by {_OWNED[key]}."
            yield Problem(f"megatron.{key}", found, "a field that the package does not set itself", action)


def megatron_fields() -> frozenset[str] | None:
    """Names of TransformerConfig's public fields; None where megatron-core is absent or does not import."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    cache = cache_folder() / f"megatron-core-{version}-fields.json"
    try:
        return frozenset(json.loads(cache.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        names = _read_fields()
    if names is not None:
        write_json(cache, sorted(names))
    return names


def _read_fields() -> frozenset[str] | None:
    command = [sys.executable, "-c", _PRINT_FIELDS]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return frozenset(json.loads(result.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
