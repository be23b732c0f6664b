"""Chooses which of Megatron-Core's fused kernels a model uses; `[megatron]` overrides each choice."""

from typing import Any

from megatron_dppo.runtime.libraries import Libraries

# Off even if it could run: neither its speed nor its numerical agreement has been measured.
_OFF: dict[str, Any] = dict(
    bias_activation_fusion=False,  # compiled by PyTorch; our experts compute without it
    bias_dropout_fusion=False,  # compiled by PyTorch; there is no dropout, and no bias to add
    apply_rope_fusion=False,  # Transformer Engine's
    masked_softmax_fusion=False,  # apex's, of an attention that neither layer spec has
    moe_permute_fusion=False,  # Transformer Engine's
    persist_layer_norm=False,  # apex's LayerNorm; all our families have RMSNorm
)


def fusions(libraries: Libraries) -> dict[str, Any]:
    """Return TransformerConfig's keywords for the fused kernels that are installed.

    `gradient_accumulation_fusion` adds weight gradients of linears into their float32 sums within the matrix
    product. Megatron's own linears, such as each model's output layer, do it only with apex's kernel.

    Megatron itself picks a fused Adam, and fused norms of gradients, where Transformer Engine or apex import.
    """
    return _OFF | dict(gradient_accumulation_fusion=libraries.fused_weight_gradient.is_usable)
