"""Estimates the bytes that latent attention keeps for backward, where it differs from grouped queries.

Megatron norms the latents, projects them up to whole queries, keys and values, and keeps those: an engine's
cache alone holds latents in their place. Flash attention takes one head size. Where a value's is smaller than a
query's, values are padded with zeros, and the result, which it keeps, is as wide.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.plan.activations import LayerModel


@dataclass(frozen=True)
class Operands:
    """Columns, of all heads of a tensor rank, of what core attention takes and makes."""

    queries: int
    keys: int
    values: int
    result: int  # that it keeps beside the input of the output projection


def operands(model: "LayerModel") -> Operands:
    """Return the columns of one rank's heads, padded where flash attention needs it."""
    sizes = model.shape.sizes
    heads = sizes.num_attention_heads // model.layout.tensor
    whole, value = heads * sizes.head_dim, heads * sizes.value_head_dim
    if model.is_flash:
        padded = max(whole, value)
        return Operands(padded, padded, padded, padded * (whole != value))
    return Operands(whole, whole, value, value)


def core_attention_inputs(model: "LayerModel") -> int:
    """Return the bytes kept when core attention is recomputed: queries, keys and values, a tensor each."""
    sizes = model.shape.sizes
    of_head = 2 * sizes.head_dim + sizes.value_head_dim
    heads = sizes.num_attention_heads // model.layout.tensor
    return model.tokens.attended * heads * of_head * model.dtype_bytes


def latents(model: "LayerModel") -> int:
    """Return the bytes of the latents' norms and of their results, the inputs of the projections up."""
    sizes, tokens, e = model.shape.sizes.latent, model.tokens, model.dtype_bytes
    if sizes is None:
        return 0
    kept = sum(
        model.norm(tokens.sequence, width) + tokens.sequence * width * e
        for width in (sizes.query_rank or 0, sizes.rank)
        if width
    )
    # What a norm keeps of keys and values is a view, with the keys' rotated part.
    return kept if model.is_norm_cast else kept + tokens.sequence * sizes.rotary_head_dim * e
