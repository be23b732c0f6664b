"""Flash attention against padded batches on one GPU, for every rank of a context group."""

import pytest
import torch
from torch import Tensor

from megatron_dppo.actor.forward import to_device
from megatron_dppo.data.batches.packing import zigzag
from megatron_dppo.models.attention import PackedAttentionForm, attention_form
from megatron_dppo.models.packed_attention import PaddedBatches, Spans, VarlenSequences
from tests.support.shared_prefixes import CASES, alone, spans_of_prefixes
from tests.unit.test_packed_attention import PACKINGS, packed, spans_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LIMIT = 2e-2  # some roundings to bfloat16, of 2e-3 each; gradients of few terms cancel


def results(
    form: PackedAttentionForm,
    spans: Spans,
    tensors: list[Tensor],
    queries: Tensor,
    keys: Tensor,
    window: int | None = None,
) -> list[Tensor]:
    """Return a rank's output and input gradients; the device never makes the host wait.

    Inputs are queries, keys and values, and sinks if there are four tensors.
    """
    attention = to_device(form.of(spans), torch.device("cuda"))
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    query, key, value = leaves[0][queries.cuda()], *(x[keys.cuda()] for x in leaves[1:3])
    sinks = leaves[3:]
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(0)).to(query)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = attention.attend(query, key, value, None, window, *sinks)
        gradients = torch.autograd.grad(output, (query, key, value, *sinks), weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [output, *gradients]


def require_equal_forms(
    spans: Spans, tensors: list[Tensor], queries: Tensor, keys: Tensor, window: int | None = None
) -> None:
    """Compare both forms in bfloat16 with padded batches in float64."""
    rounded = [tensor.detach().cuda().bfloat16() for tensor in tensors]
    expected = results(PaddedBatches, spans, [x.double() for x in rounded], queries, keys, window)
    largest = max(tensor.norm() for tensor in expected)
    for form in (PaddedBatches, VarlenSequences):
        found = results(form, spans, rounded, queries, keys, window)
        for value, exact in zip(found, expected, strict=True):
            scale = exact.norm() if exact.any() else largest  # sequences of one token: no gradient of scores
            error = (value.double() - exact).norm() / scale
            assert error <= LIMIT, f"{form.__name__}: {error:.1e}"


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_flash_attention_equals_padded_batches(packing: str, rank: int, size: int, dim: int) -> None:
    assert attention_form("cuda", torch.bfloat16, dim) is VarlenSequences
    cu_seqlens, tensors = packed(packing, size, dim)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    own = [zigzag(starts, lengths, each, size) for each in range(size)]
    require_equal_forms(spans_of(cu_seqlens, rank, size), tensors, own[rank], torch.cat(own))


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_flash_attention_with_sinks_and_windows_equals_padded_batches(
    packing: str, window: int | None, rank: int, size: int
) -> None:
    cu_seqlens, tensors = packed(packing, size, 64)
    sinks = torch.tensor([-3.0, 0.5, 2.0, 5.0])
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    own = [zigzag(starts, lengths, each, size) for each in range(size)]
    spans = spans_of(cu_seqlens, rank, size)
    require_equal_forms(spans, [*tensors, sinks], own[rank], torch.cat(own), window)


@pytest.mark.parametrize("case", CASES)
def test_flash_attention_aligns_the_last_query_of_a_shared_prefix_with_the_last_key(case: str) -> None:
    """The padded form has masks: a kernel that aligned first queries with first keys would differ."""
    spans, sources = spans_of_prefixes(alone(CASES[case]))
    rows = torch.arange(int(sources.max()) + 1)
    generator = torch.Generator().manual_seed(len(rows))
    tensors = [torch.randn(len(rows), heads, 64, generator=generator) for heads in (4, 2, 2)]
    require_equal_forms(spans, tensors, rows, rows)
