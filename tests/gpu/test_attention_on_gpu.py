"""Flash attention against padded batches on one GPU, for every rank of a context group."""

import pytest
import torch
from torch import Tensor

from megatron_dppo.actor.forward import _move
from megatron_dppo.data.batches.packing import zigzag
from megatron_dppo.models.attention import PackedAttentionForm, attention_form
from megatron_dppo.models.padded_attention import PaddedBatches
from megatron_dppo.models.varlen_attention import VarlenSequences
from tests.unit.test_packed_attention import PACKINGS, packed, spans_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LIMIT = 1e-2  # a guess: some roundings to bfloat16, of 2e-3 each


def results(
    form: PackedAttentionForm, cu_seqlens: Tensor, tensors: list[Tensor], rank: int, size: int
) -> list[Tensor]:
    """A rank's output, and the gradients of queries, keys and values; the device never makes the host wait."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    own = [zigzag(starts, lengths, each, size).cuda() for each in range(size)]
    attention = _move(form.of(spans_of(cu_seqlens, rank, size)), torch.device("cuda"))
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    query, key, value = leaves[0][own[rank]], *(x[torch.cat(own)] for x in leaves[1:])
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(rank)).to(query)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = attention.attend(query, key, value, None)
        gradients = torch.autograd.grad(output, (query, key, value), weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [output, *gradients]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_flash_attention_equals_padded_batches(packing: str, rank: int, size: int, dim: int) -> None:
    assert attention_form("cuda", torch.bfloat16, dim) is VarlenSequences
    cu_seqlens, tensors = packed(packing, size, dim)
    rounded = [tensor.detach().cuda().bfloat16() for tensor in tensors]
    expected = results(PaddedBatches, cu_seqlens, [x.double() for x in rounded], rank, size)
    largest = max(tensor.norm() for tensor in expected)
    for form in (PaddedBatches, VarlenSequences):
        found = results(form, cu_seqlens, rounded, rank, size)
        for value, exact in zip(found, expected, strict=True):
            scale = exact.norm() if exact.any() else largest  # sequences of one token: no gradient of scores
            error = (value.double() - exact).norm() / scale
            assert error <= LIMIT, f"{form.__name__}: {error:.1e}"
