"""Lists the parameters of each rank as Megatron splits them, without building a model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_dppo.architectures.family import ModelFamily
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.sizes import HFConfig, ModelSizes
from megatron_dppo.architectures.weight_map import EMBEDDING, OUTPUT, WeightRule, linears_of


@dataclass(frozen=True, order=True)
class LayerKind:
    """What a layer consists of: layers of one kind have equal sizes."""

    is_moe: bool  # experts, instead of a dense feed-forward
    is_linear: bool  # linear attention, instead of attention


@dataclass(frozen=True)
class ModelShape:
    """A family and its sizes, which determine all parameter counts."""

    family: ModelFamily
    sizes: ModelSizes

    @property
    def has_qk_norm(self) -> bool:
        """Whether the heads of queries and keys are normalised."""
        return self.family.has_qk_norm(self.sizes)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (0-based) has experts."""
        return layer in self.sizes.moe_layers

    def kind(self, layer: int) -> "LayerKind":
        """Return what a layer (0-based) consists of."""
        return LayerKind(self.is_moe(layer), layer in self.sizes.linear_layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model."""
        return _count_parameters(self)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters used for one token, with experts_per_token experts in each layer."""
        return sum(num for _, num in self._met_by_token())

    @property
    def num_multiplied_parameters(self) -> int:
        """Number of active parameters in matrix products; the input embedding is looked up."""
        is_looked_up = not self.sizes.is_tied
        return sum(
            num
            for rule, num in self._met_by_token()
            if len(rule.shapes[0]) > 1 and not (is_looked_up and rule.megatron == EMBEDDING.megatron)
        )

    def _met_by_token(self) -> Iterator[tuple[WeightRule, int]]:
        rules = (entry.rule for entry in self.family.entries(self.sizes) if not entry.rule.is_buffer)
        for rule in rules:
            times = self.sizes.experts_per_token if rule.is_expert else 1
            yield rule, times * sum(map(math.prod, rule.hf_shapes(self.sizes)))


@dataclass(frozen=True)
class Tensor:
    """One parameter of one rank."""

    name: str  # Megatron's name; "{layer}" is the placeholder of the layer's number
    shape: tuple[int, ...]
    is_expert: bool = False  # reduced over expert-data-parallel ranks, if experts are split
    is_shared_embedding: bool = False  # tied across pipeline stages

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Adapters:
    """LoRA factors A [rank, in] and B [out, rank] of each targeted Hugging Face linear."""

    rank: int
    targets: tuple[str, ...]  # last parts of the linears' names


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of one pipeline stage: the complete stage, or one virtual stage."""

    layers: range
    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the output layer

    @classmethod
    def whole(cls, shape: ModelShape) -> "Chunk":
        """Return the complete model as one chunk."""
        return cls(range(shape.sizes.num_layers), is_first=True, is_last=True)


def model_shape(hf: HFConfig) -> ModelShape:
    """Return the shape that a config.json describes."""
    family = family_of(hf)
    return ModelShape(family, family.sizes_of(hf))


@lru_cache(maxsize=16)
def _count_parameters(shape: ModelShape) -> int:
    return sum(tensor.numel for tensor in chunk_tensors(shape, Layout(world_size=1), Chunk.whole(shape)))


def padded_vocab(shape: ModelShape, layout: Layout) -> int:
    """Return the rows of the embedding over all tensor-parallel ranks: the vocabulary, padded to divide."""
    return math.ceil(shape.sizes.vocab_size / layout.tensor) * layout.tensor


def experts_at_once(num_own: int, bytes_of_one: int, max_bytes: int | None) -> int:
    """Return the number of experts that each rank sends at a time when unsplit weights are gathered.

    Args:
        num_own: Number of a rank's experts in one layer.
        bytes_of_one: Gathered bytes of a parameter of one expert of each rank.
        max_bytes: Most bytes that are gathered at a time, although one expert of each rank may take more.
            None means no limit.
    """
    return num_own if max_bytes is None else min(max(max_bytes // bytes_of_one, 1), num_own)


def largest_gathered_bytes(
    shape: ModelShape, layout: Layout, dtype_bytes: int, max_bytes: int | None = None
) -> int:
    """Return the most bytes that `checkpoints.megatron_weights.export_hf_weights` gathers at a time.

    `max_bytes` limits the experts of a layer.
    """
    rules = _rules_of(shape)
    return max(_gathered_bytes(rule, shape, layout, dtype_bytes, max_bytes) for rule in rules)


def largest_stack_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Return the bytes of the largest stack of a layer's experts that is pushed as one tensor; 0 if none is."""
    if not shape.family.has_interleaved_stacks:
        return 0
    of_experts = (rule.hf_shapes(shape.sizes) for rule in _rules_of(shape) if rule.is_expert)
    return dtype_bytes * (shape.sizes.num_experts or 0) * max(sum(map(math.prod, each)) for each in of_experts)


@lru_cache(maxsize=16)
def _rules_of(shape: ModelShape) -> frozenset[WeightRule]:
    entries = shape.family.entries(shape.sizes)
    return frozenset(entry.rule for entry in entries if not entry.rule.is_buffer)


def _gathered_bytes(
    rule: WeightRule, shape: ModelShape, layout: Layout, dtype_bytes: int, max_bytes: int | None
) -> int:
    if rule.is_vocabulary:
        return dtype_bytes * padded_vocab(shape, layout) * shape.sizes.hidden_size
    of_one = dtype_bytes * sum(map(math.prod, rule.hf_shapes(shape.sizes)))
    if not rule.is_expert:
        return of_one
    of_one *= layout.expert
    num_own = (shape.sizes.num_experts or 0) // layout.expert
    return of_one * experts_at_once(num_own, of_one, max_bytes)


def chunk_tensors(shape: ModelShape, layout: Layout, chunk: Chunk) -> tuple[Tensor, ...]:
    """Return the parameters of one rank in one model chunk, without buffers, which no optimizer updates."""
    rules = [rule for rule in shape.family.rules if not rule.is_buffer]
    first_of_kind = {shape.kind(layer): layer for layer in reversed(chunk.layers)}
    of_layer = {
        kind: [_tensor(rule, shape, layout) for rule in rules if rule.is_in(layer, shape.sizes)]
        for kind, layer in first_of_kind.items()
    }
    tensors = [_tensor(rule, shape, layout) for rule in rules if _is_outside_layers(rule, shape, layout, chunk)]
    for layer in chunk.layers:
        tensors.extend(of_layer[shape.kind(layer)])
    return tuple(tensors)


def adapter_tensors(shape: ModelShape, layout: Layout, chunk: Chunk, adapters: Adapters) -> tuple[Tensor, ...]:
    """Return the LoRA factors of one rank in one model chunk, split as `models.lora` splits them."""
    return tuple(
        factor
        for layer in chunk.layers
        for rule in shape.family.rules
        if rule.is_in(layer, shape.sizes)
        for factor in _factors(rule, shape, layout, adapters)
    )


def _factors(rule: WeightRule, shape: ModelShape, layout: Layout, adapters: Adapters) -> Iterator[Tensor]:
    """Yield one rank's A and B of each targeted linear of a parameter; one of the two is split."""
    linears, num_parts = linears_of(rule), layout.expert_tensor if rule.is_expert else layout.tensor
    for linear, (num_outputs, num_inputs) in zip(linears, rule.hf_shapes(shape.sizes), strict=False):
        if linear not in adapters.targets:
            continue
        split = [math.ceil(size / num_parts) for size in (num_outputs, num_inputs)]
        of_b, of_a = (split[0], num_inputs) if rule.tensor_parallel_dim == 0 else (num_outputs, split[1])
        for factor, size in (("lora_A", (adapters.rank, of_a)), ("lora_B", (of_b, adapters.rank))):
            name = f"{rule.megatron}.{linear}.{factor}"
            yield _of_own_experts(name, size, shape, layout) if rule.is_expert else Tensor(name, size)


def _is_outside_layers(rule: WeightRule, shape: ModelShape, layout: Layout, chunk: Chunk) -> bool:
    """Whether a chunk has this parameter, which is outside of the layers."""
    if rule.megatron == EMBEDDING.megatron:
        return chunk.is_first
    if not rule.is_of(shape.sizes):
        return False
    is_same_tensor = rule.megatron == OUTPUT.megatron and shape.sizes.is_tied and layout.pipeline == 1
    return chunk.is_last and not rule.is_in_layers and not is_same_tensor


def _tensor(rule: WeightRule, shape: ModelShape, layout: Layout) -> Tensor:
    """Return one rank's part of a parameter: its Hugging Face tensors, split and fused along dimension 0."""
    parts = [list(part) for part in rule.hf_shapes(shape.sizes)]
    dim, num_parts = rule.tensor_parallel_dim, layout.expert_tensor if rule.is_expert else layout.tensor
    for part in parts:
        if dim is not None:
            part[dim] = math.ceil(part[dim] / num_parts)
    fused = (sum(part[0] for part in parts), *parts[0][1:])
    is_shared = rule.is_vocabulary and shape.sizes.is_tied and layout.pipeline > 1
    if not rule.is_expert:
        return Tensor(rule.megatron, fused, is_shared_embedding=is_shared)
    return _of_own_experts(rule.megatron, fused, shape, layout)


def _of_own_experts(name: str, of_one: tuple[int, ...], shape: ModelShape, layout: Layout) -> Tensor:
    """Return the stack of a rank's experts; Megatron reduces unsplit ones with the dense parameters."""
    assert shape.sizes.num_experts is not None, "layers with experts are of a model with experts"
    return Tensor(name, (shape.sizes.num_experts // layout.expert, *of_one), is_expert=layout.expert > 1)
