"""Causal attention over packed sequences through PyTorch's scaled dot product, on one rank or on several."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_dppo.data.batches.token_slices import zigzag


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
        """Attend causally within each sequence, whatever `attention_mask` says; returns [T, heads * D]."""
        assert packed_seq_params is not None, "the actor always packs"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if self.context.size() == 1:
            return packed_causal_attention(query, key, value, cu_seqlens, self.softmax_scale).flatten(1)
        starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        of_rank = [zigzag(starts, lengths, rank, self.context.size()) for rank in range(self.context.size())]
        in_order = torch.cat(of_rank).argsort()
        key, value = (_gathered(x, self.context).index_select(0, in_order) for x in (key, value))
        own = of_rank[self.context.rank()]
        return sliced_causal_attention(query, key, value, own, cu_seqlens, self.softmax_scale).flatten(1)


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [T', ...] of each rank end to end, in rank order; gradients are summed over ranks in backward."""
    return gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=True, group=group)


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None
) -> Tensor:
    """Compute causal attention inside each of the packed sequences.

    Sequences of similar length share one padded batch, so work stays within a factor of four of the least.

    Args:
        query: [T, heads, D].
        key: [T, key-value heads, D].
        value: [T, key-value heads, D].
        cu_seqlens: [S+1] int32, first token of each sequence, and T.
        scale: Factor on the scores; none is 1/sqrt(D).

    Returns:
        [T, heads, D].
    """
    output = torch.zeros_like(query)
    for starts, lengths in _buckets(cu_seqlens):
        tokens, rows = _padding(starts, lengths)
        shape = (len(lengths), int(lengths.max()))
        q, k, v = (_padded(x, tokens, rows, shape) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        output = output.index_copy(0, tokens, attended.transpose(1, 2).flatten(0, 1).index_select(0, rows))
    return output


def sliced_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, own: Tensor, cu_seqlens: Tensor, scale: float | None
) -> Tensor:
    """Compute causal attention of some of the tokens to all earlier ones of their sequences.

    Args:
        query: [T', heads, D], of some tokens, as many from each sequence as its share of all tokens.
        key: [T, key-value heads, D], of all tokens.
        value: [T, key-value heads, D].
        own: [T'] int64 positions of the queries, sequence by sequence.
        cu_seqlens: [S+1] int32, first token of each sequence, and T.
        scale: Factor on the scores; none is 1/sqrt(D).

    Returns:
        [T', heads, D].
    """
    output = torch.zeros_like(query)
    parts = key.shape[0] // query.shape[0]
    place = own - cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff().long() // parts)
    for starts, lengths in _buckets(cu_seqlens):
        tokens, rows = _padding(starts, lengths)
        own_tokens, own_rows = _padding(starts // parts, lengths // parts)
        width = int(lengths.max())
        shape, own_shape = (len(lengths), width), (len(lengths), width // parts)
        k, v = (_padded(x, tokens, rows, shape) for x in (key, value))
        q = _padded(query, own_tokens, own_rows, own_shape)
        places = place.new_zeros(own_shape[0] * own_shape[1]).index_copy(0, own_rows, place[own_tokens])
        is_seen = torch.arange(width, device=key.device) <= places.view(*own_shape, 1)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_seen[:, None], scale=scale, enable_gqa=True
        )
        flat = attended.transpose(1, 2).flatten(0, 1).index_select(0, own_rows)
        output = output.index_copy(0, own_tokens, flat)
    return output


def _buckets(cu_seqlens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return ([S'] starts, [S'] lengths) of the sequences of similar length, bucket by bucket."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    bucket = torch.ceil(torch.log2(lengths.double().clamp(min=1))).long()
    return [(starts[bucket == b], lengths[bucket == b]) for b in bucket.unique().tolist()]


def _padding(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the sequences' tokens, and their rows in a batch padded to the longest."""
    columns = torch.arange(int(lengths.max()), device=starts.device)
    is_token = columns < lengths[:, None]  # [S', width]
    return (starts[:, None] + columns)[is_token], is_token.flatten().nonzero()[:, 0]


def _padded(x: Tensor, tokens: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Pad [T, heads, D] -> [S', heads, width, D], zero after the end of a sequence."""
    batch = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, rows, x.index_select(0, tokens))
    return batch.view(*shape, *x.shape[1:]).transpose(1, 2)
