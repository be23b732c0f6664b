"""The packing of a micro-batch for its layers, computed once on the host for all of them."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_dppo.models.padded_attention import PaddedBatches
from megatron_dppo.models.varlen_attention import VarlenSequences
from megatron_dppo.types import Microbatch

PackedAttentionForm = type[PaddedBatches] | type[VarlenSequences]


def head_dim_of(config: TransformerConfig) -> int:
    """Return the size of a head, the larger one if keys and values differ in size."""
    if isinstance(config, MLATransformerConfig):
        return max(config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
    assert config.kv_channels is not None, "the model's family sets it"
    return config.kv_channels


def attention_form(device_type: str, dtype: torch.dtype, head_dim: int) -> PackedAttentionForm:
    """Select the form of attention over packed sequences: flash attention if PyTorch supports it.

    Flash attention takes half-precision tensors on a GPU, and heads of up to 256 elements in steps of 8. All
    other cases, including float32 on a GPU, are computed in padded batches.
    """
    is_half = dtype in (torch.float16, torch.bfloat16)
    has_flash = device_type == "cuda" and is_half and head_dim % 8 == 0 and head_dim <= 256
    return VarlenSequences if has_flash else PaddedBatches


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of packed sequences, with positions and the index tensors of attention."""

    position_ids: Tensor  # [T'] int64, from 0 in each sequence, of this rank's tokens
    attention: PaddedBatches | VarlenSequences
    rotary_table: Tensor | None = None  # of latent attention, computed by the first layer

    @classmethod
    def of(cls, microbatch: Microbatch, rank: int, size: int, form: PackedAttentionForm) -> "PackedSequences":
        """Return the packing of this rank's part of a micro-batch, on the host.

        Args:
            microbatch: Micro-batch with the `cu_seqlens` of all context-parallel ranks.
            rank: Index of this rank in its context-parallel group.
            size: Number of ranks in that group.
            form: Form of attention, see `attention_form`.
        """
        cu_seqlens, longest = microbatch.cu_seqlens.cpu(), microbatch.max_seqlen
        # Transformer Engine's attention over several ranks needs it, though there is no gap between sequences.
        padded = cu_seqlens if size > 1 else None
        return cls(
            qkv_format="thd",
            cu_seqlens_q_padded=padded,  # type: ignore[arg-type]  # none by default
            cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=microbatch.position_ids,
            attention=form.of(cu_seqlens, rank, size),
        )
