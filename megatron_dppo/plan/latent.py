"""Estimates the bytes that latent attention keeps for backward, if they differ from grouped queries.

Megatron normalises the latents, projects them up to full queries, keys and values, and keeps these. Only an
engine's cache stores latents instead. Flash attention needs one head size. If values have a smaller head size
than queries, they are padded with zeros, and the kept result has the padded width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.plan.activations import LayerModel


@dataclass(frozen=True)
class Operands:
    """Columns of core attention's inputs and outputs, for all heads of a tensor rank."""

    queries: int
    keys: int
    values: int
    result: int  # kept in addition to the input of the output projection


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
    # For keys and values, a norm keeps a view that includes the keys' rotated part.
    return kept if model.is_norm_cast else kept + tokens.sequence * sizes.rotary_head_dim * e
