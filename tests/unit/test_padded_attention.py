"""Attention in padded batches equals attention of each sequence alone, on every rank of a context group."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.data.batches.token_slices import zigzag
from megatron_dppo.models.padded_attention import PaddedBatches

HEADS, GROUPS, DIM = 4, 2, 8
PACKINGS = {
    "one sequence": (24,),
    "equal ones": (16, 16, 16),
    "five batches": (8, 8, 16, 40, 72, 72, 200),
    "out of order": (72, 8, 200, 16, 8),
}


def packed(lengths: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """[S+1] int32, and queries, keys and values in float64 that want gradients."""
    ends = torch.tensor(lengths).cumsum(0)
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return torch.cat([ends.new_zeros(1), ends]).int(), [tensor.requires_grad_() for tensor in tensors]


def attention_of_each(cu_seqlens: Tensor, tensors: list[Tensor], scale: float | None) -> Tensor:
    """[T, heads, D], sequence by sequence."""
    parts: list[Tensor] = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in tensors)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_it_equals_attention_of_each_sequence(lengths: tuple[int, ...], size: int) -> None:
    cu_seqlens, tensors = packed(lengths)
    expected = attention_of_each(cu_seqlens, tensors, 0.3)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, weights)
    starts, all_lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    own = [zigzag(starts, all_lengths, rank, size) for rank in range(size)]
    query, key, value = tensors
    gathered = torch.cat(own)
    outputs = [
        PaddedBatches.of(cu_seqlens, rank, size).attend(query[own[rank]], key[gathered], value[gathered], 0.3)
        for rank in range(size)
    ]
    output = torch.cat(outputs).index_select(0, gathered.argsort())
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(output, tensors, weights)
    for value, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-12)


def test_batches_hold_sequences_of_similar_length() -> None:
    cu_seqlens, _ = packed(PACKINGS["out of order"])
    batches = PaddedBatches.of(cu_seqlens)
    assert [(batch.num_sequences, batch.width) for batch in batches.batches] == [
        (2, 8),
        (1, 16),
        (1, 72),
        (1, 200),
    ]
    assert batches.rows is not None and torch.equal(batches.rows, batches.own_rows)
    assert len(batches.rows.unique()) == int(cu_seqlens[-1]), "a row for each token"
