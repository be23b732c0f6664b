"""Buckets: every tensor once, bit for bit, and never more memory than was allowed."""

import pytest
import torch
from torch import Tensor

from megatron_dppo.weight_sync.buckets import Buffer

SHAPES = [(3, 4), (5,), (1,), (8, 8), (2, 2, 2), (7,)]


def weights() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]
    return [
        *found,
        ("half", torch.ones(3, dtype=torch.bfloat16)),
        ("transposed", torch.arange(6.0).view(2, 3).T),
    ]


@pytest.mark.parametrize("num_bytes", [1, 60, 300, 10_000])
def test_every_tensor_comes_once_and_bit_for_bit(num_bytes: int) -> None:
    sizes: list[int] = []
    found: list[tuple[str, Tensor]] = []
    for bucket in Buffer(num_bytes).fill(iter(weights())):
        assert {tensor.dtype for _, tensor in bucket.tensors()} == {bucket.flat.dtype}
        sizes.append(bucket.flat.numel() * bucket.flat.element_size())
        found += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
    assert [name for name, _ in found] == [name for name, _ in weights()]
    for (_, tensor), (_, expected) in zip(found, weights(), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in weights())
    assert max(sizes) <= max(num_bytes, largest)


def test_the_memory_is_one_and_the_same() -> None:
    places = {bucket.flat.data_ptr() for bucket in Buffer(300).fill(iter(weights()))}
    assert len(places) == 1


def test_nothing_makes_no_bucket() -> None:
    assert list(Buffer(100).fill([])) == []
