"""The model's parameters as Megatron splits them: which tensors each rank holds, without building any.

Letters in shapes: H hidden, V vocabulary, D head dimension, I feed-forward width, F expert width, E experts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megatron_dppo.architectures.layout import Layout, ModelSizes
from megatron_dppo.architectures.registry import family_of


@dataclass(frozen=True)
class ModelShape:
    """Everything about a model that decides how many parameters it has."""

    sizes: ModelSizes
    is_tied: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # of the attention's output projection
    has_mlp_bias: bool = False

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (0-based) has experts."""
        return layer in self.sizes.moe_layers

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return _count_parameters(self)

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets: experts_per_token of the experts."""
        sizes = self.sizes
        idle = (sizes.num_experts or 0) - sizes.experts_per_token
        expert = 3 * sizes.hidden_size * sizes.moe_intermediate_size
        return self.num_parameters - len(sizes.moe_layers) * idle * expert


@dataclass(frozen=True)
class Tensor:
    """One parameter of one rank."""

    name: str
    shape: tuple[int, ...]
    is_expert: bool = False  # reduced over expert-data-parallel ranks, where experts are split
    is_shared_embedding: bool = False  # tied across pipeline stages

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of one pipeline stage: all of it, or one virtual stage."""

    layers: range
    is_first: bool  # holds the embedding
    is_last: bool  # holds the final norm and the output layer

    @classmethod
    def whole(cls, shape: ModelShape) -> "Chunk":
        """The model in one piece."""
        return cls(range(shape.sizes.num_layers), is_first=True, is_last=True)


def model_shape(content: Mapping[str, Any], sizes: ModelSizes) -> ModelShape:
    """The shape that a config.json describes.

    Raises:
        ConfigError: No family has the architecture.
    """
    family = family_of(content)
    has_bias = bool(content.get("attention_bias")) and not family.has_qkv_bias  # then on the output too
    return ModelShape(
        sizes=sizes,
        is_tied=bool(content.get("tie_word_embeddings")),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=has_bias or family.has_qkv_bias,
        has_output_bias=has_bias,
        has_mlp_bias=bool(content.get("mlp_bias")),
    )


@lru_cache(maxsize=16)
def _count_parameters(shape: ModelShape) -> int:
    return sum(tensor.numel for tensor in chunk_tensors(shape, Layout(world_size=1), Chunk.whole(shape)))


def padded_vocab(shape: ModelShape, layout: Layout) -> int:
    """Rows of the embedding over all tensor-parallel ranks: the vocabulary, made divisible."""
    return math.ceil(shape.sizes.vocab_size / layout.tensor) * layout.tensor


def chunk_tensors(shape: ModelShape, layout: Layout, chunk: Chunk) -> tuple[Tensor, ...]:
    """The parameters of one rank in one model chunk, in Megatron's order.

    Args:
        shape: The model's.
        layout: How it is split.
        chunk: Which layers.
    """
    hidden, vocabulary = shape.sizes.hidden_size, padded_vocab(shape, layout) // layout.tensor
    is_shared = shape.is_tied and layout.pipeline > 1
    kinds = {shape.is_moe(layer) for layer in chunk.layers}
    of_layer = {is_moe: _layer_tensors(shape, layout, is_moe) for is_moe in kinds}
    tensors: list[Tensor] = []
    if chunk.is_first:
        tensors.append(Tensor("embedding", (vocabulary, hidden), is_shared_embedding=is_shared))
    for layer in chunk.layers:
        tensors.extend(of_layer[shape.is_moe(layer)])
    if chunk.is_last:
        tensors.append(Tensor("final_norm", (hidden,)))
        if is_shared or not shape.is_tied:
            tensors.append(Tensor("output_layer", (vocabulary, hidden), is_shared_embedding=is_shared))
    return tuple(tensors)


def _layer_tensors(shape: ModelShape, layout: Layout, is_moe: bool) -> tuple[Tensor, ...]:
    return (*_attention_tensors(shape, layout.tensor), *_mlp_tensors(shape, layout, is_moe))


def _attention_tensors(shape: ModelShape, tensor: int) -> list[Tensor]:
    sizes = shape.sizes
    hidden, head = sizes.hidden_size, sizes.head_dim
    heads = sizes.num_attention_heads * head // tensor
    qkv = (sizes.num_attention_heads + 2 * sizes.num_key_value_heads) * head // tensor
    tensors = [
        Tensor("input_norm", (hidden,)),
        Tensor("attention_output", (hidden, heads)),
        Tensor("qkv", (qkv, hidden)),
    ]
    if shape.has_qk_norm:
        tensors += [Tensor("q_norm", (head,)), Tensor("k_norm", (head,))]
    if shape.has_qkv_bias:
        tensors.append(Tensor("qkv_bias", (qkv,)))
    if shape.has_output_bias:
        tensors.append(Tensor("attention_output_bias", (hidden,)))
    return tensors


def _mlp_tensors(shape: ModelShape, layout: Layout, is_moe: bool) -> list[Tensor]:
    sizes, hidden = shape.sizes, shape.sizes.hidden_size
    norm = Tensor("mlp_norm", (hidden,))
    if is_moe:
        assert sizes.num_experts is not None, "MoE layers have experts"
        own, width = sizes.num_experts // layout.expert, sizes.moe_intermediate_size // layout.expert_tensor
        is_expert = layout.expert > 1  # Megatron reduces unsplit experts with the dense parameters
        return [
            norm,
            Tensor("router", (sizes.num_experts, hidden)),
            Tensor("experts_fc1", (own, 2 * width, hidden), is_expert),
            Tensor("experts_fc2", (own, hidden, width), is_expert),
        ]
    width = sizes.intermediate_size // layout.tensor
    tensors = [norm, Tensor("fc1", (2 * width, hidden)), Tensor("fc2", (hidden, width))]
    if shape.has_mlp_bias:
        tensors += [Tensor("fc1_bias", (2 * width,)), Tensor("fc2_bias", (hidden,))]
    return tensors
