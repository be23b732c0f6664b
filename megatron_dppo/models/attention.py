"""Core attention of the torch layer spec: over packed sequences, on one rank or on several."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dppo.models.packed_sequences import PackedSequences


class PackedAttention(torch.nn.Module):
    """Core attention over packed (`thd`) sequences; under context parallelism keys and values are gathered."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **__: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None, "Megatron gives the groups to each attention"
        self.softmax_scale = softmax_scale
        self.context: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend causally within each sequence, ignoring `attention_mask`. Return [T, heads * D]."""
        assert isinstance(packed_seq_params, PackedSequences), "the actor always packs"
        if self.context.size() > 1:
            shapes = key.shape[1:], value.shape[1:]  # in one collective
            gathered = _gathered(torch.cat((key.flatten(1), value.flatten(1)), dim=1), self.context)
            parts = gathered.split([shape.numel() for shape in shapes], dim=1)
            key, value = (part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))
        return packed_seq_params.attention.attend(query, key, value, self.softmax_scale).flatten(1)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [T', ...] of each rank end to end, in rank order; gradients are summed over ranks in backward."""
    return gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=True, group=group)
