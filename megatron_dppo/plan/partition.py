"""Splits the model by a layout: the chunks of each pipeline stage, and the elements on its ranks.

With the distributed optimizer, Megatron keeps parameters and gradients of a model chunk in buffers: each
tensor starts at a multiple of 64 elements, and a buffer's end is padded so that it divides over the ranks that
share it. Dense parameters are shared by data x context ranks, and split experts by expert-data-parallel ranks.
With LoRA the buffers contain adapters, and the model's frozen weights are outside of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_dppo.architectures.layout import Layout, layers_of_stages
from megatron_dppo.architectures.parameters import (
    Adapters,
    Chunk,
    ModelShape,
    Tensor,
    adapter_tensors,
    chunk_tensors,
)

ALIGN_START, ALIGN_END = 64, 128  # elements, of megatron.core's parameter and gradient buffers


@dataclass(frozen=True)
class Elements:
    """Number of elements of some of a rank's trained parameters."""

    own: int  # without padding
    buffer: int  # with padding: size of the parameters' and of the gradients' buffer
    shard: int  # this rank's part for the optimizer, including padding
    sharers: int  # number of ranks with the same parameters


@dataclass(frozen=True)
class StagePart:
    """Part of the model on a rank of one pipeline stage."""

    stage: int  # 0-based
    chunks: tuple[Chunk, ...]  # one, or one for each virtual stage
    dense: Elements
    expert: Elements  # split experts; unsplit experts count as dense
    largest: int  # elements of the largest tensor
    largest_trained: int  # elements of the largest tensor with a gradient
    frozen: int = 0  # elements without a gradient

    @property
    def buffer(self) -> int:
        """Number of elements in the gradient buffers."""
        return self.dense.buffer + self.expert.buffer

    @property
    def weights(self) -> int:
        """Number of elements of all parameters, padding included."""
        return self.buffer + self.frozen

    @property
    def shard(self) -> int:
        """Number of elements with optimizer states on this rank."""
        return self.dense.shard + self.expert.shard


def chunks_of(stage: int, layout: Layout, num_layers: int) -> tuple[Chunk, ...]:
    """Return the model chunks of a stage, in order: one, or with interleaving several of equal size.

    Args:
        stage: 0-based pipeline stage.
        layout: Layout with pipeline and virtual_pipeline; with interleaving they divide the layers.
        num_layers: Number of the model's layers.
    """
    if layout.virtual_pipeline == 1:
        of_stages = layers_of_stages(num_layers, layout.pipeline)
        assert of_stages is not None, "layouts that leave a stage empty are refused before they are planned"
        start = sum(of_stages[:stage])
        own = range(start, start + of_stages[stage])
        return (Chunk(own, own.start == 0, own.stop == num_layers),)
    of_chunk, rest = divmod(num_layers, layout.pipeline * layout.virtual_pipeline)
    assert not rest, "layouts that do not divide the layers are refused before they are planned"
    starts = [(index * layout.pipeline + stage) * of_chunk for index in range(layout.virtual_pipeline)]
    return tuple(
        Chunk(range(start, start + of_chunk), start == 0, start + of_chunk == num_layers) for start in starts
    )


@lru_cache(maxsize=4096)
def partition(
    shape: ModelShape, layout: Layout, is_distributed: bool, adapters: Adapters | None = None
) -> tuple[StagePart, ...]:
    """Return the parts of all pipeline stages.

    Args:
        shape: Shape of the model.
        layout: Layout that splits it.
        is_distributed: Whether the distributed optimizer is in use.
        adapters: Adapters that are trained instead of the model's weights.
    """
    parts: list[StagePart] = []
    alike: dict[tuple[tuple[bool | int, ...], ...], StagePart] = {}
    for stage in range(layout.pipeline):
        chunks = chunks_of(stage, layout, shape.sizes.num_layers)
        kind = tuple((c.is_first, c.is_last, len(c.layers), sum(map(shape.is_moe, c.layers))) for c in chunks)
        if kind not in alike:
            alike[kind] = _part(shape, layout, stage, chunks, is_distributed, adapters)
        parts.append(replace(alike[kind], stage=stage, chunks=chunks))
    return tuple(parts)


def _part(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    chunks: tuple[Chunk, ...],
    is_distributed: bool,
    adapters: Adapters | None,
) -> StagePart:
    held = [chunk_tensors(shape, layout, chunk) for chunk in chunks]
    trained = held
    if adapters is not None:
        trained = [adapter_tensors(shape, layout, chunk, adapters) for chunk in chunks]
    num_expert_sharers = layout.world_size // (layout.expert * layout.expert_tensor * layout.pipeline)
    return StagePart(
        stage=stage,
        chunks=chunks,
        dense=_elements(
            [bucket for tensors in trained for bucket in _dense_buckets(tensors)],
            layout.data * layout.context,
            is_distributed,
        ),
        expert=_elements(
            [[t.numel for t in tensors if t.is_expert] for tensors in trained],
            num_expert_sharers,
            is_distributed,
        ),
        largest=_largest(held),
        largest_trained=_largest(trained),
        frozen=sum(t.numel for tensors in held for t in tensors) if trained is not held else 0,
    )


def _largest(chunks: Sequence[Sequence[Tensor]]) -> int:
    return max(tensor.numel for tensors in chunks for tensor in tensors)


def _dense_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of elements that are padded together, by bucket; a shared embedding has its own."""
    shared = [[t.numel] for t in tensors if t.is_shared_embedding]
    return [[t.numel for t in tensors if not (t.is_expert or t.is_shared_embedding)], *shared]


def _elements(buckets: Sequence[Sequence[int]], sharers: int, is_distributed: bool) -> Elements:
    own = sum(map(sum, buckets))
    if not is_distributed:
        return Elements(own, own, own, sharers)
    end = math.lcm(sharers, ALIGN_END)
    buffer = sum(_up(sum(_up(numel, ALIGN_START) for numel in bucket), end) for bucket in buckets)
    return Elements(own, buffer, buffer // sharers, sharers)


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
