"""Builds a Megatron-Core GPT model for a Hugging Face config, in either layer spec."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_dppo.architectures.layout import layers_of_stages
from megatron_dppo.architectures.megatron_options import (
    LayerSpecName,
    RouterCoefficients,
    choose_layer_spec,
    shares_prefixes,
)
from megatron_dppo.architectures.registry import family_of, model_sizes
from megatron_dppo.architectures.sizes import (
    SINKS,
    HFConfig,
    ModelSizes,
    rope_kind,
    rope_scaling_factor,
    yarn_table,
)
from megatron_dppo.architectures.weight_map import VECTOR
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.mcore.layer_functions import share_rotary_table
from megatron_dppo.models.attention import choose_flash_attention
from megatron_dppo.models.delta_rule import kernel_fault
from megatron_dppo.models.layer_spec import BLOCK_SPECS, BlockSpec
from megatron_dppo.runtime.libraries import Libraries
from megatron_dppo.runtime.process import Runtime, gpu_libraries

logger = logging.getLogger(__name__)


# Fused kernels that stay off: neither their speed nor their numerical agreement has been measured.
_OFF: dict[str, Any] = dict(
    bias_activation_fusion=False,  # compiled by PyTorch; our experts compute without it
    bias_dropout_fusion=False,  # compiled by PyTorch; there is no dropout, and no bias to add
    apply_rope_fusion=False,  # Transformer Engine's
    masked_softmax_fusion=False,  # apex's, of an attention that neither layer spec has
    moe_permute_fusion=False,  # Transformer Engine's
    persist_layer_norm=False,  # apex's LayerNorm; all our families have RMSNorm
)


def transformer_config(
    hf: HFConfig,
    dtype: torch.dtype,
    parallel: dict[str, Any],
    overrides: dict[str, Any],
    layer_spec: LayerSpecName = "torch",
) -> TransformerConfig:
    """Return Megatron's config of the model.

    Args:
        hf: config.json.
        dtype: Type of parameters and activations.
        parallel: Megatron's parallel sizes, from `Layout`.
        overrides: The user's `[megatron]` table, which replaces any of them.
        layer_spec: The one that the model is going to be built in.
    """
    RouterCoefficients.of(overrides)
    settings: dict[str, Any] = dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=False,
        moe_token_dispatcher_type="alltoall",  # ranks hold micro-batches of unequal lengths, dense models too
    )
    settings |= fusions(gpu_libraries()) | family_of(hf).megatron_config(hf) | parallel
    settings |= _uneven_stages(model_sizes(hf).num_layers, parallel) | overrides
    has_experts = settings.get("num_moe_experts") is not None
    settings["moe_grouped_gemm"] = has_experts and layer_spec == "transformer_engine"
    try:
        kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
        config = kind(**settings)
    except (ValueError, TypeError, AssertionError, KeyError, AttributeError) as error:
        action = "Correct [megatron]; these are fields of Megatron's TransformerConfig."
        expected = "settings that Megatron accepts together"
        raise ConfigError(Problem("megatron", f"{overrides}: {error}", expected, action)) from error
    # The actor adds them itself: what Megatron adds depends on packing and on the layout.
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, None
    config.moe_router_load_balancing_type = "none"
    return config


def fusions(libraries: Libraries) -> dict[str, Any]:
    """Return TransformerConfig's keywords for fused kernels that are installed; `[megatron]` overrides them.

    `gradient_accumulation_fusion` adds weight gradients of linears into their float32 sums within the matrix
    product. Megatron's own linears, such as each model's output layer, do it only with apex's kernel.

    Megatron itself picks a fused Adam, and fused norms of gradients, where Transformer Engine or apex import.
    """
    return _OFF | dict(gradient_accumulation_fusion=libraries.fused_weight_gradient.is_usable)


def _uneven_stages(num_layers: int, parallel: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields that divide layers over pipeline stages which do not divide them; else nothing."""
    stages = parallel.get("pipeline_model_parallel_size", 1)
    of_stages = layers_of_stages(num_layers, stages)
    if of_stages is None or len(set(of_stages)) == 1 or parallel.get("virtual_pipeline_model_parallel_size"):
        return {}
    first, *_, last = of_stages
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def agreed_layer_spec(config: Config, runtime: Runtime, model: ModelSizes | None = None) -> LayerSpecName:
    """Resolve `model.layer_spec`, the same on all ranks; rank 0 logs the choice and the reason."""
    choice = choose_layer_spec(config, gpu_libraries().transformer_engine, model)
    kernels = [] if model is None or choice.name != "torch" else _kernels(config, runtime, model)
    names = runtime.all_gather(", ".join([choice.name, *(kernel.partition(":")[0] for kernel in kernels)]))
    if len(set(names)) > 1:
        other = next(rank for rank, name in enumerate(names) if name != names[0])
        found = f"{config.model.layer_spec!r}: {names[0]} on rank 0, {names[other]} on rank {other}"
        action = "Install the same packages on all nodes, or name one in the config."
        raise ConfigError(Problem("model.layer_spec", found, "one layer spec on all ranks", action))
    logger.info("layers of the %s spec: %s", choice.name, choice.reason)
    for kernel in kernels:
        logger.info("attention: %s", kernel)
    often = "once" if shares_prefixes(config, model, choice.name) else "for each sample"
    logger.info("prefixes that samples of a micro-batch share are forwarded %s", often)
    return choice.name


def _kernels(config: Config, runtime: Runtime, model: ModelSizes) -> list[str]:
    """Return the kernels of attention, and of linear attention if the model has it, each with the reason."""
    dtype, head_dim = getattr(torch, config.model.dtype), max(model.head_dim, model.value_head_dim)
    found = [choose_flash_attention(runtime.device, dtype, head_dim, has_sinks=SINKS in model.options)]
    if (linear := model.linear) is not None:
        heads = linear.num_value_heads // config.parallel.tensor
        fault = kernel_fault(runtime.device.type, dtype, heads, linear.key_head_dim, linear.value_head_dim)
        right = "flash-linear-attention: it is installed, and its results are right"
        found.append(right if fault is None else f"PyTorch's operators for linear attention: {fault}")
    return found


def build_model(hf: HFConfig, config: TransformerConfig, layer_spec: LayerSpecName = "torch") -> list[GPTModel]:
    """Build this rank's part of the model, one chunk per virtual pipeline stage, with uninitialised weights.

    Megatron's process groups must exist. Load a checkpoint before use.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if num_chunks is None else range(num_chunks)
    chunks = [_chunk(hf, config, stage, BLOCK_SPECS[layer_spec]) for stage in stages]
    for chunk in chunks:
        _mark_parameters(chunk, hf)
    return chunks


def _mark_parameters(chunk: GPTModel, hf: HFConfig) -> None:
    """Mark vectors, for weight decay, and parameters split over tensor-parallel ranks, for the gradient norm.

    Megatron marks split parameters when it initialises weights, but a model that loads weights is not
    initialised.
    """
    table = family_of(hf).weight_table(hf)
    for name, parameter in chunk.named_parameters():
        rule = table.entry(name).rule
        setattr(parameter, VECTOR, rule.is_vector)
        dim = rule.tensor_parallel_dim
        if dim is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, True, dim, stride=1)


def _chunk(hf: HFConfig, config: TransformerConfig, stage: int | None, block_spec: BlockSpec) -> GPTModel:
    sizes = model_sizes(hf)
    spec: Any = block_spec(config, sizes, stage)  # Megatron annotates it as one layer's
    ranks = config.tensor_model_parallel_size
    rotary_base: Any = sizes.rope_theta  # annotated as int, and used as any number
    rope_factor = rope_scaling_factor(hf)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-sizes.vocab_size // ranks) * ranks,
        max_sequence_length=sizes.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=sizes.is_tied,
        position_embedding_type="rope",
        rotary_percent=sizes.rotary_percent,
        rotary_base=rotary_base,
        rope_scaling=rope_factor is not None,
        rope_scaling_factor=rope_factor or 1.0,
        vp_stage=stage,
    )
    if sizes.latent is None and rope_kind(family_of(hf).completed(hf)) == "yarn":
        model.rotary_pos_emb = yarn_embedding(hf)
    if not config.apply_rope_fusion:
        share_rotary_table(model)
    return model


def yarn_embedding(hf: HFConfig) -> YarnRotaryEmbedding:
    """Return YaRN's frequencies of complete heads, which Megatron's config has no fields for."""
    sizes, yarn = model_sizes(hf), yarn_table(family_of(hf).completed(hf))
    assert yarn is not None, "the model has them"
    return YarnRotaryEmbedding(
        sizes.head_dim,
        rotary_base=sizes.rope_theta,
        scaling_factor=yarn["factor"],
        original_max_position_embeddings=yarn["original_max_position_embeddings"],
        beta_fast=yarn.get("beta_fast") or 32,
        beta_slow=yarn.get("beta_slow") or 1,
        mscale=yarn["mscale"],
        mscale_all_dim=yarn["mscale_all_dim"],
        correction_range_round_to_int=yarn.get("truncate", True),
    )
