"""Rules about the `[megatron]` pass-through table, without importing Megatron here.

Names and types of `TransformerConfig` fields are read in a subprocess and cached per version of megatron-core.
Megatron checks their combination in another subprocess, once for each combination.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from megatron_dppo import __version__
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.megatron_options import BALANCE, Z, router_loss_problems
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checks.facts import Facts, rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.runtime.files import cache_folder, write_json

_PRINT_FIELDS = """
import dataclasses, json, types, typing
from megatron.core.transformer import MLATransformerConfig  # which is a TransformerConfig
def kinds(hint):
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in kinds(part)]
    if origin is typing.Literal:
        return [json.dumps(choice) for choice in typing.get_args(hint)]
    if origin in (list, tuple) or hint in (list, tuple):
        return ["list"]
    return [{bool: "bool", int: "int", float: "float", str: "str", type(None): "none"}.get(hint, "any")]
hints = typing.get_type_hints(MLATransformerConfig)
names = [field.name for field in dataclasses.fields(MLATransformerConfig) if field.name[0] != "_"]
print(json.dumps({name: kinds(hints[name]) for name in names}))
"""
_BUILD_CONFIG = """
import json, sys, torch
from megatron_dppo.mcore.groups import megatron_sizes
from megatron_dppo import __version__
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.errors import ConfigError
from megatron_dppo.models.build import transformer_config
hf, dtype, layout, overrides = json.load(sys.stdin)
try:
    transformer_config(hf, getattr(torch, dtype), megatron_sizes(Layout(**layout)), overrides)
    print(json.dumps([]))
except ConfigError as error:
    print(json.dumps([problem.found for problem in error.problems]))
"""
_FROM_MODEL = "the model's config.json (model.load)"
_BY_TRAINER = "the training loop, which depends on it"
_DISPATCHER = "moe_token_dispatcher_type"
_BY_PACKING = "packing: ranks have different numbers of tokens, which only alltoall and, on GPUs, flex support"
_LEFT_OUT = "the model's family, which trains no layers that predict further tokens"
_BY_ENGINE = "the engine's routers, which sample without it; in training it would depend on the micro-batch"
_BY_FAMILY = "the model's family, which builds no attention of this kind"
_BY_FORWARD = "the trainer's forward, which computes one micro-batch at a time"
_PROVEN_STAGES = "parallel.pipeline: only this division of layers was compared with one process"
_PROVEN_SHARDS = "parallel.tensor: only these shards were compared with one process"
_PROVEN_CONTEXT = "parallel.context: only gathered keys and values were compared with one process"
_OWNED: dict[str, str] = {
    field: owner
    for owner, fields in {
        "parallel.tensor": "tensor_model_parallel_size",
        "parallel.pipeline": "pipeline_model_parallel_size",
        "parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "parallel.context": "context_parallel_size",
        "parallel.expert": "expert_model_parallel_size",
        "parallel.expert_tensor": "expert_tensor_parallel_size",
        "parallel.tensor (on whenever it is above 1)": "sequence_parallel",
        "rollout.routing_replay": "moe_enable_routing_replay",
        _BY_PACKING: _DISPATCHER,
        _PROVEN_STAGES: """
            num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
            account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
            pipeline_model_parallel_layout microbatch_group_size_per_vp_stage
        """,
        _PROVEN_SHARDS: """
            tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards gtp_weight_remat_size
            expert_gtp_weight_remat_size
        """,
        _PROVEN_CONTEXT: "hierarchical_context_parallel_sizes cp_comm_type",
        "model.dtype": "params_dtype pipeline_dtype autocast_dtype bf16 fp16 fp8 fp4",
        "model.layer_spec": "transformer_impl moe_grouped_gemm moe_use_legacy_grouped_gemm use_kitchen",
        _FROM_MODEL: """
            num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
            normalization layernorm_epsilon qk_layernorm gated_linear_unit activation_func add_bias_linear
            add_qkv_bias rotary_interleaved softmax_scale num_moe_experts moe_ffn_hidden_size moe_router_topk
            moe_layer_freq moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
            moe_shared_expert_intermediate_size multi_latent_attention mtp_num_layers use_mup
            moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk q_lora_rank kv_lora_rank
            qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
            rotary_scaling_factor beta_fast beta_slow attention_output_gate linear_attention_freq
            linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
            linear_num_value_heads moe_shared_expert_gate original_max_position_embeddings mscale
            mscale_all_dim cache_mla_latents softmax_type window_size window_attn_skip_freq
            activation_func_clamp_value glu_linear_offset
        """,
        _BY_FAMILY: """
            experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
            dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        """,
        _BY_TRAINER: """
            calculate_per_token_loss variable_seq_lengths hidden_dropout attention_dropout
            perform_initialization use_cpu_initialization init_model_with_meta_device overlap_p2p_comm
            batch_p2p_comm finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
            param_sync_func timers
        """,
        _BY_ENGINE: """
            moe_input_jitter_eps moe_router_force_load_balancing moe_token_dropping moe_expert_capacity_factor
            moe_pad_expert_input_to_capacity moe_token_drop_policy
        """,
        _BY_FORWARD: """
            overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release
        """,
        _LEFT_OUT: "mtp_loss_scaling_factor",
    }.items()
    for field in fields.split()
}
"""TransformerConfig fields that the package sets, each with the setting or the part that decides it."""
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
}


@rule("megatron_names", needs="machine")
def _megatron_names(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [megatron] are TransformerConfig fields."""
    known = megatron_fields() if config.megatron else None
    for key in config.megatron:
        if known is not None and key not in known:
            action = did_you_mean(key, sorted(known - _OWNED.keys()), "Remove it.", "megatron.{}".format)
            yield Problem(f"megatron.{key}", key, "a field of Megatron's TransformerConfig", action)


@rule("megatron_owned")
def _megatron_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[megatron] has no field that the package sets."""
    for key in config.megatron:
        if key in _OWNED and not (key == _DISPATCHER and _is_flex(config)):
            found = f"{key} = {config.megatron[key]!r}"
            action = f"Remove it from [megatron]; it is set by {_OWNED[key]}."
            yield Problem(f"megatron.{key}", found, "a field that the package does not set itself", action)


def _is_flex(config: Config) -> bool:
    return config.megatron.get(_DISPATCHER) == "flex"


@rule("megatron_flex")
def _megatron_flex(config: Config, facts: Facts) -> Iterator[Problem]:
    """DeepEP's dispatcher, if selected, gets experts on several ranks, in the type that it sums."""
    sizes = facts.model_sizes
    if not _is_flex(config) or sizes is None:
        return
    expert_tensor = config.parallel.expert_tensor or config.parallel.tensor
    backend = config.megatron.get("moe_flex_dispatcher_backend", "deepep")
    faults = {
        "a model without experts": ("a mixture of experts", sizes.num_experts is None),
        "all experts complete on each rank": (
            "parallel.expert or parallel.tensor above 1: Megatron refuses it otherwise",
            config.parallel.expert * expert_tensor == 1,
        ),
        f"model.dtype = {config.model.dtype!r}": (
            "'bfloat16': DeepEP sums the outputs of experts in no other type",
            config.model.dtype != "bfloat16",
        ),
        f"moe_flex_dispatcher_backend = {backend!r}": ("'deepep': others are not tested", backend != "deepep"),
        "megatron.moe_permute_fusion off": (
            "true: our sums over experts need exactly top-k experts of each token, and a rank has fewer",
            config.megatron.get("moe_permute_fusion") is not True,
        ),
    }
    for found, (expected, is_so) in faults.items():
        if is_so:
            yield Problem(
                f"megatron.{_DISPATCHER}", f"'flex' with {found}", expected, "Correct it, or remove it."
            )


@rule("megatron_flex_library", needs="machine")
def _megatron_flex_library(config: Config, facts: Facts) -> Iterator[Problem]:
    """DeepEP can be used if its dispatcher is selected."""
    if facts.deep_ep is not None and not facts.deep_ep.is_usable:
        found = f"'flex', and DeepEP cannot be used here: {facts.deep_ep.fault}"
        action = "Remove it (alltoall is the default), or build DeepEP for this machine's GPUs from its source."
        yield Problem(f"megatron.{_DISPATCHER}", found, "a deep_ep that imports, and a GPU", action)


@rule("megatron_router_losses")
def _megatron_router_losses(config: Config, facts: Facts) -> Iterator[Problem]:
    """Losses on routers are the same in every layout, and the model has routers."""
    yield from router_loss_problems(config.megatron)
    sizes = facts.model_sizes
    for key in (BALANCE, Z):
        if config.megatron.get(key) and sizes is not None and sizes.num_experts is None:
            found = f"{config.megatron[key]!r} on a dense model"
            yield Problem(f"megatron.{key}", found, "a model with experts", "Remove it.")


@rule("megatron_expert_bias")
def _megatron_expert_bias(config: Config, facts: Facts) -> Iterator[Problem]:
    """Expert biases move only if routers have them, and if the moved biases are saved."""
    key, name = "moe_router_bias_update_rate", facts.architecture
    if not config.megatron.get(key) or facts.model_sizes is None or isinstance(facts.model, Problem):
        return
    family = FAMILIES.get(name or "")
    settings = family.megatron_config(facts.model) if family is not None else {}
    if not settings.get("moe_router_enable_expert_bias"):
        found = f"{config.megatron[key]!r}, for routers without expert biases"
        yield Problem(f"megatron.{key}", found, "0", "Remove it.")
    elif config.lora.rank:
        found = f"{config.megatron[key]!r} with lora.rank = {config.lora.rank}"
        expected = "0: an exported adapter does not contain the biases"
        yield Problem(f"megatron.{key}", found, expected, "Remove it.")


@rule("megatron_values", needs="machine")
def _megatron_values(config: Config, facts: Facts) -> Iterator[Problem]:
    """Values of [megatron] have the types of Megatron's fields, and are among their choices."""
    fields = (megatron_fields() if config.megatron else None) or {}
    for key, value in config.megatron.items():
        kinds = fields.get(key, ["any"])
        if key not in _OWNED and "any" not in kinds and not kinds_of(value) & set(kinds):
            expected = " or ".join(_KINDS.get(kind, kind) for kind in kinds if kind != "none")
            yield Problem(f"megatron.{key}", json.dumps(value), expected, "Correct or remove it.")


@rule("megatron_config", needs="trial")
def _megatron_config(config: Config, facts: Facts) -> Iterator[Problem]:
    """Megatron accepts a TransformerConfig of the model, the layout and [megatron]."""
    if not config.megatron or facts.architecture not in FAMILIES:
        return
    rules = (_megatron_names, _megatron_owned, _megatron_router_losses, _megatron_values)
    others = [each for each in rules if any(each(config, facts))]
    try:
        layout = Layout.of(config.parallel, facts.world_size)
    except ConfigError:  # another rule reports it
        return
    settings = [facts.model, config.model.dtype, asdict(layout), config.megatron]
    for refusal in [] if others else _refusals(settings):
        action = "Correct [megatron]; these are fields of Megatron's TransformerConfig."
        yield Problem("megatron", refusal, "settings that Megatron accepts together", action)


def kinds_of(value: object) -> set[str]:
    """Return the kinds that a TOML value can have, as `megatron_fields` names them."""
    plain = {bool: {"bool"}, int: {"int", "float"}, float: {"float"}, str: {"str"}, list: {"list"}}
    return plain.get(type(value), {"any"}) | {json.dumps(value, default=str)}


def megatron_fields() -> Mapping[str, list[str]] | None:
    """Return the kinds of values that each public field of TransformerConfig takes.

    A kind is bool, int, float, str, list, none, any, or one choice as JSON. The result is None if
    megatron-core is absent or does not import.
    """
    version = _version()
    if version is None:
        return None
    cache = cache_folder() / f"megatron-core-{version}-all-fields.json"
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(cache.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    fields = _read_fields()
    if fields is not None:
        write_json(cache, fields)
    return fields


def _read_fields() -> dict[str, list[str]] | None:
    return _last_line(_PRINT_FIELDS)


def _refusals(settings: list[Any]) -> list[str]:
    """Return Megatron's objections to a config; an empty list if it accepts the config or is not installed."""
    version, text = _version(), json.dumps(settings, sort_keys=True)
    if version is None:
        return []
    key = hashlib.blake2b(f"{__version__} {text}".encode(), digest_size=16).hexdigest()
    cache = cache_folder() / f"megatron-core-{version}-config-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(cache.read_text(encoding="utf-8"))
    refusals = _last_line(_BUILD_CONFIG, text)
    if refusals is not None:
        write_json(cache, refusals)
    return refusals or []


def _version() -> str | None:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _last_line(program: str, given: str = "") -> Any:
    """Run a program, and return the last line that it prints, as JSON; None if it fails."""
    command = [sys.executable, "-c", program]
    try:
        result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=True)
        return json.loads(result.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None
