"""Rotary embedding of packed sequences: one table for a micro-batch, and float32 rotations in its layers.

Megatron's own function slices its table sequence by sequence in each layer, which waits for the device, and
rounds cosines and sines to the activations' dtype.
"""

from collections.abc import Callable
from typing import Any

import megatron.core.transformer.attention as attention
import torch
from torch import Tensor

_megatron_rotation = attention.apply_rotary_pos_emb


def install() -> None:
    """Have Megatron's attention rotate by the table of `PackedRotary`."""
    setattr(attention, "apply_rotary_pos_emb", apply_rotary_pos_emb)  # noqa: B010 - a name that it imported


class PackedRotary(torch.nn.Module):
    """Gives all layers of a model one table for each micro-batch: [2, T, 1, D] float32, cosines and sines.

    Sines are negative in the first half of a row, as `rotated` expects.
    """

    def __init__(self, angles: Callable[..., Any]) -> None:
        """Take Megatron's `RotaryEmbedding`, which gives the angles of all positions, [longest, 1, 1, D]."""
        super().__init__()
        self.angles = angles

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> Any:
        """Return the packing, the last argument, which Megatron then gives to `forward` as a length."""
        return arguments[-1]

    def forward(self, packing: Any, **_: Any) -> Tensor:
        """Return the table for `packing.position_ids`, [T] int64, all below `packing.max_seqlen_q`."""
        angles: Tensor = self.angles(packing.max_seqlen_q, packed_seq=True)
        sines, negative = angles.sin(), angles.shape[-1] // 2
        sines[..., :negative].neg_()
        return torch.stack([angles.cos(), sines]).squeeze(2).index_select(1, packing.position_ids)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, *given: Any, mscale: float = 1.0, **options: Any
) -> Tensor:
    """Rotate queries or keys [T, heads, D], as Megatron's function of that name.

    Args:
        t: Queries or keys.
        freqs: The table of `PackedRotary`; Megatron's where Transformer Engine's kernel rotates.
        config: Of the model.
        given: Megatron's further arguments.
        mscale: Factor on cosines and sines.
        options: Megatron's further arguments.
    """
    if config.apply_rope_fusion:
        return _megatron_rotation(t, freqs, config, *given, mscale=mscale, **options)
    assert mscale == 1.0 and freqs.shape[-1] == t.shape[-1], "no family scales, and all rotate whole heads"
    return _Rotation.apply(t, freqs)


def rotated(t: Tensor, table: Tensor, *, is_back: bool = False) -> Tensor:
    """Rotate [T, heads, D] by a table [2, T, 1, D], or back, in float32; rounded once to the dtype of `t`."""
    cosines, sines = table
    along, across = t * cosines, t.roll(t.shape[-1] // 2, -1) * sines
    return torch.add(along, across, alpha=-1 if is_back else 1, out=torch.empty_like(t))


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
