"""A Megatron-Core GPT model for a Hugging Face config, in the torch layer spec."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from megatron_dppo.actor.layout import model_sizes
from megatron_dppo.models.family import HFConfig, family_of
from megatron_dppo.models.layer_spec import torch_block_spec

# What needs Transformer Engine or apex; `[megatron]` may turn each on where they are installed.
_WITHOUT_FUSIONS: dict[str, Any] = dict(
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    apply_rope_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
    moe_permute_fusion=False,
    persist_layer_norm=False,
)


def transformer_config(
    hf: HFConfig, dtype: torch.dtype, parallel: dict[str, Any], overrides: dict[str, Any]
) -> TransformerConfig:
    """Megatron's config of the model.

    Args:
        hf: config.json.
        dtype: Type of parameters and activations.
        parallel: Megatron's parallel sizes, from `Layout`.
        overrides: The user's `[megatron]` table, which has the last word.
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
    )
    settings |= _WITHOUT_FUSIONS | family_of(hf).transformer_config(hf) | parallel | overrides
    return TransformerConfig(**settings)


def build_model(hf: HFConfig, config: TransformerConfig) -> GPTModel:
    """The model with uninitialised weights; load a checkpoint into it before use."""
    spec: Any = torch_block_spec(config)  # Megatron annotates it as one layer's
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
        position_embedding_type="rope",
        rotary_base=int(model_sizes(hf).rope_theta),
    )
