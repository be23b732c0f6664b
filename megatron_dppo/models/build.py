"""Builds a Megatron-Core GPT model for a Hugging Face config, in either layer spec."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_dppo.architectures.layout import layers_of_stages
from megatron_dppo.architectures.refusals import rope_scaling_factor
from megatron_dppo.architectures.registry import family_of, model_sizes
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.spec_choice import LayerSpecName
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.mcore.rotary import share_rotary_table
from megatron_dppo.models.fusions import fusions
from megatron_dppo.models.layer_spec import BLOCK_SPECS, BlockSpec
from megatron_dppo.runtime.process import gpu_libraries


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

    Raises:
        ConfigError: Megatron refuses the settings.
    """
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
        return kind(**settings)
    except (ValueError, TypeError, AssertionError, KeyError, AttributeError) as error:
        action = "Correct [megatron]; these are fields of Megatron's TransformerConfig."
        expected = "settings that Megatron accepts together"
        raise ConfigError(Problem("megatron", f"{overrides}: {error}", expected, action)) from error


def _uneven_stages(num_layers: int, parallel: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields that divide layers over pipeline stages which do not divide them; else nothing."""
    stages = parallel.get("pipeline_model_parallel_size", 1)
    of_stages = layers_of_stages(num_layers, stages)
    if of_stages is None or len(set(of_stages)) == 1 or parallel.get("virtual_pipeline_model_parallel_size"):
        return {}
    first, *_, last = of_stages
    return {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}


def build_model(hf: HFConfig, config: TransformerConfig, layer_spec: LayerSpecName = "torch") -> list[GPTModel]:
    """Build this rank's part of the model, one chunk per virtual pipeline stage, with uninitialised weights.

    Megatron's process groups must exist. Load a checkpoint before use.
    """
    num_chunks = config.virtual_pipeline_model_parallel_size
    stages = [None] if num_chunks is None else range(num_chunks)
    chunks = [_chunk(hf, config, stage, BLOCK_SPECS[layer_spec]) for stage in stages]
    for chunk in chunks:
        _mark_split_parameters(chunk, hf)
    return chunks


def _mark_split_parameters(chunk: GPTModel, hf: HFConfig) -> None:
    """Mark parameters split over tensor-parallel ranks, for the gradient norm; others count once.

    Megatron marks them where it initialises weights, which a model that is about to be loaded does without.
    """
    table = family_of(hf).weight_table(hf)
    for name, parameter in chunk.named_parameters():
        dim = table.entry(name).rule.tensor_parallel_dim
        if dim is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, True, dim, stride=1)


def _chunk(hf: HFConfig, config: TransformerConfig, stage: int | None, block_spec: BlockSpec) -> GPTModel:
    spec: Any = block_spec(config, stage)  # Megatron annotates it as one layer's
    ranks = config.tensor_model_parallel_size
    sizes = model_sizes(hf)
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
    if not config.apply_rope_fusion:
        share_rotary_table(model)
    return model
