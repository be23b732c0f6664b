"""The rotation of packed queries and keys: Megatron's in float32, bit for bit; one rounding in bfloat16."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_dppo.data.batches.token_slices import zigzag
from megatron_dppo.mcore.rotary import PackedRotary, apply_rotary_pos_emb

HEADS, LENGTHS = 3, (4, 28, 12, 200, 8)
CONFIG: Any = SimpleNamespace(apply_rope_fusion=False)


def frequencies(head_dim: int) -> Any:
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    rotary = RotaryEmbedding(head_dim, 1.0, rotary_base=10000, use_cpu_initialization=True, cp_group=group)

    def angles(longest: int, packed_seq: bool) -> Tensor:  # what it returns where its device is CUDA
        return rotary.get_freqs_non_repeated(longest).repeat(1, 2)[:, None, None]

    return angles


def slices(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """[S+1] int32 of the whole packing, and [T'] positions of a context-parallel rank's tokens."""
    lengths = torch.tensor(LENGTHS)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    own = zigzag(starts, lengths, rank, size)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int()
    return cu_seqlens, own - starts.repeat_interleave(lengths)[own]


def table_of(embedding: Any, positions: Tensor) -> Tensor:
    packing = SimpleNamespace(position_ids=positions, max_seqlen_q=max(LENGTHS))
    return PackedRotary(embedding)(packing)


def rotated(t: Tensor, table: Tensor) -> Tensor:
    return apply_rotary_pos_emb(t, table, config=CONFIG, cu_seqlens=None, cp_group=None)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_float32_is_megatrons_bit_for_bit(head_dim: int, rank: int, size: int) -> None:
    embedding = frequencies(head_dim)
    cu_seqlens, positions = slices(rank, size)
    ours = torch.randn(len(positions), HEADS, head_dim).requires_grad_()
    megatrons, gradient = ours.detach().clone().requires_grad_(), torch.randn_like(ours)
    group: Any = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    angles = embedding(max(LENGTHS), packed_seq=True)
    expected = rope_utils._apply_rotary_pos_emb_thd(megatrons, cu_seqlens, angles, cp_group=group)
    found = rotated(ours, table_of(embedding, positions))
    expected.backward(gradient)
    found.backward(gradient)
    assert torch.equal(found, expected)
    assert ours.grad is not None and megatrons.grad is not None
    assert torch.equal(ours.grad, megatrons.grad)


def test_bfloat16_rounds_once() -> None:
    embedding = frequencies(128)
    _, positions = slices(0, 1)
    t = torch.randn(len(positions), HEADS, 128).bfloat16().requires_grad_()
    found = rotated(t, table_of(embedding, positions))
    angles = embedding(max(LENGTHS), packed_seq=True)[positions]
    exact = rope_utils._apply_rotary_pos_emb_bshd(t.detach().double()[:, None], angles.double())[:, 0]
    least = relative_error(exact.bfloat16(), exact)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, exact) < 1.02 * least  # 1.5e-3
    rounded = rope_utils._apply_rotary_pos_emb_bshd(t.detach()[:, None], angles)[:, 0]
    assert relative_error(rounded, exact) > 1.4 * least, "Megatron's, 2.3e-3"
    found.backward(exact.bfloat16())
    assert t.grad is not None
    back = rope_utils._apply_rotary_pos_emb_bshd(exact.bfloat16().double()[:, None], -angles.double())[:, 0]
    assert relative_error(t.grad, back) < 1.02 * relative_error(back.bfloat16(), back)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.detach().double() - exact).norm() / exact.norm())
