"""Rotary embedding of packed sequences: one table for a micro-batch, and float32 rotations in its layers.

Megatron's own function slices its table sequence by sequence in each layer, which waits for the device, and
rounds cosines and sines to the activations' dtype.
"""

from typing import Any

import megatron.core.transformer.attention as attention
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from torch import Tensor

_megatron_rotation = attention.apply_rotary_pos_emb


def install() -> None:
    """Have Megatron's attentions rotate by the table of `PackedRotary`."""
    for module in (attention, multi_latent_attention):
        setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)  # noqa: B010 - a name that it imported


def share_rotary_table(model: Any) -> None:
    """Give all layers of a GPT model one table for each micro-batch, of latent attention too."""
    if not model.config.multi_latent_attention:
        model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)
        return
    attentions = [layer.self_attention for layer in model.decoder.layers]
    shared = LatentRotary(attentions[0].rotary_pos_emb)
    for each in attentions:
        each.rotary_pos_emb = shared


class PackedRotary(torch.nn.Module):
    """Gives all layers of a model one table for each micro-batch: [T, 1, 2, D] float32, cosines and sines.

    Sines are negative in the first half of a row, as `rotated` expects. D is the rotated part of a head.
    """

    def __init__(self, angles: Any) -> None:
        """Take Megatron's embedding, whose `get_emb` gives the angles of all positions, [longest, 1, 1, D].

        YaRN's gives a factor on cosines and sines besides. Its `forward` would be cached for the process, and
        keep this model's process groups, with their threads, from ending.
        """
        super().__init__()
        self.angles = angles

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> Any:
        """Return the packing, the last argument, which Megatron then gives to `forward` as a length."""
        return arguments[-1]

    def forward(self, packing: Any, **_: Any) -> Any:
        """Return the table for `packing.position_ids`, [T] int64, all below `packing.max_seqlen_q`."""
        return self.table(packing)

    def table(self, packing: Any) -> Tensor:
        """Make the table."""
        found = self.angles.get_emb(packing.max_seqlen_q)
        angles, scale = found if isinstance(found, tuple) else (found, 1.0)
        sines, negative = angles.sin(), angles.shape[-1] // 2
        sines[..., :negative].neg_()
        table = torch.cat([angles.cos(), sines], dim=-2)
        return (table if scale == 1.0 else table * scale).index_select(0, packing.position_ids)


class LatentRotary(PackedRotary):
    """The same for latent attention, whose layers ask one after another: the packing keeps the table."""

    def forward(self, packing: Any, **_: Any) -> Any:
        """Return the table, with a factor that remains to be applied where Megatron expects YaRN's."""
        if packing.rotary_table is None:
            packing.rotary_table = self.table(packing)
        is_yarn = isinstance(self.angles, YarnRotaryEmbedding)
        return (packing.rotary_table, 1.0) if is_yarn else packing.rotary_table


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, *given: Any, mscale: float = 1.0, **options: Any
) -> Tensor:
    """Rotate queries or keys [T, heads, D], as Megatron's function of that name.

    Args:
        t: Queries or keys.
        freqs: The table of `PackedRotary`; Megatron's table if Transformer Engine's kernel rotates.
        config: Config of the model.
        given: Megatron's further arguments.
        mscale: Factor on cosines and sines.
        options: Megatron's further arguments.
    """
    if config.apply_rope_fusion:
        return _megatron_rotation(t, freqs, config, *given, mscale=mscale, **options)
    assert mscale == 1.0, "the table holds the factor"
    if config.multi_latent_attention:  # its pairs are adjacent; queries and keys are permuted in the same way
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    return _Rotation.apply(t, freqs)


def rotated(t: Tensor, table: Tensor, *, is_back: bool = False) -> Tensor:
    """Rotate [T, heads, D] by a table [T, 1, 2, R], or back, in float32; rounded once to the dtype of `t`.

    The first R columns are rotated, and others returned as they are.
    """
    cosines, sines = table.unbind(-2)
    width, result = table.shape[-1], torch.empty_like(t)
    part = t[..., :width]
    along, across = part * cosines, part.roll(width // 2, -1) * sines
    torch.add(along, across, alpha=-1 if is_back else 1, out=result[..., :width])
    if width < t.shape[-1]:
        result[..., width:] = t[..., width:]
    return result


class _Rotation(torch.autograd.Function):
    """A rotation; its gradient is the gradient rotated back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return rotated(t, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return rotated(gradients[0], table, is_back=True), None
