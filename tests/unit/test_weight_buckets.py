"""Buckets: every tensor once, bit for bit, and never more memory than was allowed."""

import base64
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_dppo.engines.weight_sync.transports import Bucket, Buffer, _pickle

SHAPES = [(3, 4), (5,), (1,), (8, 8), (2, 2, 2), (7,)]


def weights() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(SHAPES)]
    return [
        *found,
        ("half", torch.ones(3, dtype=torch.bfloat16)),
        ("transposed", torch.arange(6.0).view(2, 3).T),
    ]


def tensors_of(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """Views of the buffer by name."""
    parts = bucket.flat.split([torch.Size(shape).numel() for shape in bucket.shapes])
    return [
        (name, part.view(shape)) for name, part, shape in zip(bucket.names, parts, bucket.shapes, strict=True)
    ]


@pytest.mark.parametrize("num_bytes", [1, 60, 300, 10_000])
def test_every_tensor_comes_once_and_bit_for_bit(num_bytes: int) -> None:
    sizes: list[int] = []
    found: list[tuple[str, Tensor]] = []
    for bucket in Buffer(num_bytes).fill(iter(weights())):
        sizes.append(bucket.flat.numel() * bucket.flat.element_size())
        found += [(name, tensor.clone()) for name, tensor in tensors_of(bucket)]
    assert [name for name, _ in found] == [name for name, _ in weights()]
    for (_, tensor), (_, expected) in zip(found, weights(), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in weights())
    assert max(sizes) <= max(num_bytes, largest)


@pytest.mark.parametrize("num_bytes", [1, 40, 60, 300, 10_000])
def test_tensors_that_travel_together_share_a_bucket(num_bytes: int) -> None:
    together = {"w1": "a", "w2": "a", "w4": "b", "w5": "b"}
    buckets = [bucket.names for bucket in Buffer(num_bytes, together=together).fill(iter(weights()))]
    assert [name for names in buckets for name in names] == [name for name, _ in weights()]
    for group in ("a", "b"):
        members = {name for name, of in together.items() if of == group}
        assert sum(bool(members & set(names)) for names in buckets) == 1


def test_tensors_that_travel_together_must_follow_each_other() -> None:
    with pytest.raises(AssertionError, match="a comes in one piece"):
        list(Buffer(100, together={"w0": "a", "w2": "a"}).fill(iter(weights())))


def test_the_memory_is_one_and_the_same() -> None:
    places = {bucket.flat.data_ptr() for bucket in Buffer(300).fill(iter(weights()))}
    assert len(places) == 1


def test_nothing_makes_no_bucket() -> None:
    assert list(Buffer(100).fill([])) == []


@pytest.mark.parametrize("num_bytes", [60, 10_000])
def test_one_handle_shows_a_server_a_whole_bucket(num_bytes: int) -> None:
    """A handle costs a server about a millisecond on a GPU; a 30B has some 19,000 tensors."""
    handled: list[Tensor] = []

    def counted(tensor: Tensor) -> Any:
        handled.append(tensor)
        return reductions.reduce_tensor(tensor)

    ForkingPickler.register(Tensor, counted)
    try:
        for num_buckets, bucket in enumerate(Buffer(num_bytes, is_shared=True).fill(iter(weights())), 1):
            shown = pickle.loads(base64.b64decode(_pickle(bucket)))
            flat: Tensor = shown["flattened_tensor"]
            assert flat.dtype == torch.uint8
            assert flat.numel() == sum(place.numel for place in shown["metadata"])
            for place, (name, tensor) in zip(shown["metadata"], tensors_of(bucket), strict=True):
                part = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
                assert place.name == name
                assert torch.equal(part, tensor)
            assert len(handled) == num_buckets
    finally:
        ForkingPickler.register(Tensor, reductions.reduce_tensor)
