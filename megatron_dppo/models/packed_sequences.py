"""What all layers need to know of the packing of a micro-batch."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of packed sequences, with positions."""

    position_ids: Tensor  # [T] int64, from 0 in each sequence, of this rank's tokens
