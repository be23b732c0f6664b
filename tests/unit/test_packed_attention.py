"""Attention over packed sequences equals attention of each sequence alone, on every rank of a context group.

Flash attention runs as `varlen_reference` has it, called through PyTorch's own `varlen_attn`.
"""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_dppo.data.batches.packing import zigzag
from megatron_dppo.models import attention, packed_attention
from megatron_dppo.models.attention import (
    PackedAttentionForm,
    activate_flash_attention_3,
    attention_form,
    choose_flash_attention,
)
from megatron_dppo.models.packed_attention import PaddedBatches, Spans, VarlenSequences
from tests.support import varlen_reference

HEADS, GROUPS, DIM = 4, 2, 8
FORMS: list[PackedAttentionForm] = [PaddedBatches, VarlenSequences]
# In the least lengths that ranks can share: two pieces of one token for each rank.
PACKINGS = {
    "one sequence": (3,),
    "the shortest": (1, 1, 1),
    "five batches": (1, 1, 2, 5, 9, 9, 25),
    "out of order": (9, 1, 25, 2, 1),
}


@pytest.fixture(scope="module", autouse=True)
def _varlen_on_cpus() -> None:
    varlen_reference.install()


def packed(packing: str, size: int = 1, dim: int = DIM) -> tuple[Tensor, list[Tensor]]:
    """[S+1] int32, and queries, keys and values in float64 that want gradients."""
    lengths = torch.tensor(PACKINGS[packing]) * (2 * size if size > 1 else 1)
    ends, num_tokens = lengths.cumsum(0), int(lengths.sum())
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, dim) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return torch.cat([ends.new_zeros(1), ends]).int(), [tensor.requires_grad_() for tensor in tensors]


def test_a_torch_without_the_keyword_gets_fewer_key_value_heads_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch 2.11, whose kernel takes them unasked."""
    passed: dict[str, Any] = {}

    def older(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Tensor:
        passed.update(options, num_heads=(query.shape[1], key.shape[1]))
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    sequences: Any = runpy.run_path(packed_attention.__file__)["VarlenSequences"]
    cu_seqlens, tensors = packed("five batches")
    sequences.of(spans_of(cu_seqlens, 0, 1)).attend(*tensors, None)
    assert passed.pop("num_heads") == (HEADS, GROUPS)
    assert set(passed) == {"window_size", "scale"}


def spans_of(cu_seqlens: Tensor, rank: int, size: int) -> Spans:
    return Spans.of_pieces(cu_seqlens, rank, size) if size > 1 else Spans.of_sequences(cu_seqlens)


def attention_of_each(cu_seqlens: Tensor, tensors: list[Tensor], scale: float | None) -> Tensor:
    """[T, heads, D], sequence by sequence."""
    parts: list[Tensor] = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in tensors)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_attention_equals_attention_per_sequence(
    packing: str, size: int, form: PackedAttentionForm
) -> None:
    cu_seqlens, tensors = packed(packing, size)
    scale = 0.3 if size == 2 else None
    expected = attention_of_each(cu_seqlens, tensors, scale)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, weights)
    starts, all_lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    own = [zigzag(starts, all_lengths, rank, size) for rank in range(size)]
    query, key, value = tensors
    gathered = torch.cat(own)
    outputs = [
        form.of(spans_of(cu_seqlens, rank, size)).attend(
            query[own[rank]], key[gathered], value[gathered], scale
        )
        for rank in range(size)
    ]
    output = torch.cat(outputs).index_select(0, gathered.argsort())
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(output, tensors, weights)
    for value, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-12)


def test_batches_hold_sequences_of_similar_length() -> None:
    cu_seqlens, _ = packed("out of order")
    batches = PaddedBatches.of(Spans.of_sequences(cu_seqlens))
    assert all(batch.places is None and batch.num_queries == batch.num_keys for batch in batches.batches)
    assert [(batch.num_spans, batch.num_keys) for batch in batches.batches] == [
        (2, 1),
        (1, 2),
        (1, 9),
        (1, 25),
    ]
    assert torch.equal(batches.key_rows, batches.query_rows)
    assert len(batches.key_rows.unique()) == int(cu_seqlens[-1]), "a row for each token"


def test_flash_attention_gets_keys_as_they_lie_on_one_rank_and_those_of_both_pieces_on_several() -> None:
    cu_seqlens, _ = packed("five batches", 2)
    num_tokens = int(cu_seqlens[-1])
    alone = VarlenSequences.of(Spans.of_sequences(cu_seqlens))
    assert alone.keys is None and torch.equal(alone.cu_seqlens_k, cu_seqlens) and alone.max_k == 100
    for rank in (0, 1):
        pieces = VarlenSequences.of(Spans.of_pieces(cu_seqlens, rank, 2))
        assert pieces.keys is not None and (pieces.max_q, pieces.max_k) == (25, 25 * (4 - rank))
        assert pieces.keys.rows.numel() == pieces.cu_seqlens_k[-1] == num_tokens * 5 / 4
        assert pieces.cu_seqlens_q[-1] == num_tokens / 2


def test_the_reference_aligns_masks_as_pytorch_does() -> None:
    bottom_right = causal_lower_right(3, 7)._materialize()  # type: ignore[attr-defined]
    assert torch.equal(varlen_reference.is_seen(3, 7, [-1, 0]), bottom_right)


@pytest.mark.parametrize(
    ("device_type", "dtype", "head_dim", "form"),
    [
        ("cuda", torch.bfloat16, 128, VarlenSequences),
        ("cuda", torch.float16, 256, VarlenSequences),
        ("cuda", torch.float32, 128, PaddedBatches),
        ("cuda", torch.bfloat16, 100, PaddedBatches),
        ("cuda", torch.bfloat16, 264, PaddedBatches),
        ("cpu", torch.bfloat16, 128, PaddedBatches),
        ("cpu", torch.float32, 128, PaddedBatches),
    ],
)
def test_flash_attention_is_chosen_if_supported(
    device_type: str, dtype: torch.dtype, head_dim: int, form: PackedAttentionForm
) -> None:
    assert attention_form(device_type, dtype, head_dim) is form
    if form is PaddedBatches:
        assert choose_flash_attention(torch.device(device_type), dtype, head_dim).startswith("padded batches")


STAND_IN = """
import torch

library = torch.library.Library("flash_attn_3", "DEF")
for name in {names}:
    library.define(f"{{name}}(Tensor q) -> Tensor")
"""


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("names", "is_wrong", "chosen"),
    [
        (None, False, "FlashAttention-2: .*ModuleNotFoundError"),
        (("fwd",), False, "FlashAttention-2: .*backward"),
        (("fwd", "bwd"), True, "FlashAttention-2: .*results are wrong"),
        (("fwd", "bwd"), False, "FlashAttention-3: "),
    ],
)
def test_flash_attention_3_is_taken_if_its_package_is_there_and_right(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...] | None,
    is_wrong: bool,
    chosen: str,
    has_sinks: bool,
) -> None:
    """PyTorch's activation, with operators of these names; the CPU kernel replaces Megatron's."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    if names is not None:
        (tmp_path / "flash_attn_interface.py").write_text(STAND_IN.format(names=names))
    if is_wrong:
        attend = VarlenSequences.attend
        monkeypatch.setattr(VarlenSequences, "attend", lambda *arguments: attend(*arguments) * 1.1)
    try:
        found = activate_flash_attention_3(torch.device("cpu"), torch.bfloat16, 64, has_sinks=has_sinks)
        assert re.match(chosen, found), found
        is_active = torch.nn.attention.current_flash_attention_impl() == "FA3"
        assert is_active == found.startswith("FlashAttention-3")
    finally:
        if torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()
        if (module := sys.modules.pop("flash_attn_interface", None)) is not None:
            module.library._destroy()


def test_a_gpu_that_is_no_hopper_keeps_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "compute_capability", lambda _: (10, 0))
    found = choose_flash_attention(torch.device("cuda"), torch.bfloat16, 128)
    assert found.startswith("FlashAttention-2: ") and "not 10.0" in found


def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """[T, heads, D] of one sequence: a softmax over the scores of all keys that are seen, and the sink."""
    q, k, v = (x.transpose(0, 1).repeat_interleave(HEADS // x.shape[1], 0) for x in (query, key, value))
    seen = varlen_reference.is_seen(len(query), len(key), [-1 if window is None else window - 1, 0])
    scores = (q @ k.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
        v = F.pad(v, (0, 0, 0, 1))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("window", "has_sinks"), [(1, False), (4, False), (4, True), (None, True)])
def test_windows_and_sinks_equal_a_softmax_over_what_each_query_sees(
    window: int | None, has_sinks: bool, size: int, form: PackedAttentionForm
) -> None:
    """In sequences that are longer than the window, and with sinks above and below the scores."""
    cu_seqlens, tensors = packed("five batches", size)
    sinks = torch.tensor([-3.0, 0.5, 2.0, 5.0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    inputs = tensors if sinks is None else [*tensors, sinks]
    query, key, value = tensors
    sequences = zip(*(x.split(cu_seqlens.diff().tolist()) for x in (query, key, value)), strict=True)
    expected = torch.cat([attention_with_sinks(q, k, v, window, sinks) for q, k, v in sequences])
    own = [zigzag(cu_seqlens[:-1].long(), cu_seqlens.diff().long(), rank, size) for rank in range(size)]
    gathered = torch.cat(own)
    outputs = [
        form.of(spans_of(cu_seqlens, rank, size)).attend(
            query[own[rank]], key[gathered], value[gathered], None, window, sinks
        )
        for rank in range(size)
    ]
    output = torch.cat(outputs).index_select(0, gathered.argsort())
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(each, inputs, weights) for each in (output, expected)]
    for found, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-12)
