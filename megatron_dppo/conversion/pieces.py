"""Where each Hugging Face tensor stands in a Megatron distributed checkpoint: names and shapes alone.

A distributed checkpoint holds whole tensors, however the model that wrote it was split. Their keys are those of
Megatron's Transformer Engine spec, which our `torch` spec writes too. Where all layers are alike they are one
tensor with an axis for the layers, and the experts of a layer are one tensor always.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.architectures.family import HFConfig
from megatron_dppo.architectures.layout import ModelSizes, model_sizes
from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.weight_map import (
    DENSE_MLP,
    EMBEDDING,
    MOE_MLP,
    OUTPUT,
    WeightRule,
    WeightTable,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A block of a stored tensor, and the Hugging Face tensors that are in it.

    Attributes:
        rule: Of the parameter that the block belongs to.
        key: Of the stored tensor.
        whole: Its shape.
        offset: Where in it the block begins.
        shape: Of the block; axes for layers and experts included.
        hf: Names of the Hugging Face tensors, in the order in which they are in it.
        hf_shapes: Their shapes.
        layer: Global, 0-based; none outside layers.
    """

    rule: WeightRule
    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    hf: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    layer: int | None

    @property
    def num_elements(self) -> int:
        """In the block."""
        return torch.Size(self.shape).numel()

    @property
    def has_layer_axis(self) -> bool:
        """Whether the stored tensor is of all layers."""
        return self.layer is not None and not self.key.startswith(f"decoder.layers.{self.layer}.")

    def fuse(self, tensors: Sequence[Tensor], table: WeightTable) -> Tensor:
        """The block, with memory of its own, of its Hugging Face tensors in order."""
        if self.rule.is_expert:
            block = torch.stack(list(tensors))
        elif self.rule.fusion == "qkv":
            block = table.fuse(self.rule, tensors)
        else:
            block = tensors[0].clone(memory_format=torch.contiguous_format)
        return block.reshape(self.shape)

    def unfuse(self, block: Tensor, table: WeightTable) -> list[Tensor]:
        """Inverse of `fuse`: views where that is possible."""
        if self.rule.is_expert:
            return list(block.reshape(len(self.hf), *self.hf_shapes[0]).unbind())
        if self.rule.fusion == "qkv":
            return table.unfuse(self.rule, block.reshape(-1, *self.hf_shapes[0][1:]))
        return [block.reshape(self.hf_shapes[0])]


def pieces_of(hf: HFConfig, max_elements: int | None = None) -> Iterator[Piece]:
    """Every block of a model's checkpoint: each Hugging Face tensor is in exactly one, and they do not overlap.

    Args:
        hf: The model's config.json.
        max_elements: Stacks of experts are cut into equal blocks of at most so many elements, of one expert at
            least; none leaves the gates of a layer's experts, and so on, in one.
    """
    sizes, shapes = model_sizes(hf), _Shapes.of(hf)
    is_tied = bool(hf.get("tie_word_embeddings"))
    rules = family_of(hf).rules
    yield from _outside_layers(EMBEDDING, shapes)
    for layer in range(sizes.num_layers):
        others = DENSE_MLP if layer in sizes.moe_layers else MOE_MLP
        for rule in rules:
            if "{layer}" in rule.megatron and rule not in others:
                yield from _of_layer(rule, layer, shapes, max_elements)
    for rule in rules:
        is_left_out = rule == EMBEDDING or (is_tied and rule == OUTPUT)
        if "{layer}" not in rule.megatron and not is_left_out:
            yield from _outside_layers(rule, shapes)


def hf_shapes(hf: HFConfig) -> dict[str, Shape]:
    """The name and shape of each tensor in the model's Hugging Face checkpoint, one name per expert."""
    pairs = (zip(piece.hf, piece.hf_shapes, strict=True) for piece in pieces_of(hf))
    return {name: shape for of_piece in pairs for name, shape in of_piece}


def stored_key(rule: WeightRule, layer: int | None, sizes: ModelSizes) -> str:
    """The key of a parameter's tensor, with the layer's number."""
    name = rule.transformer_engine or rule.megatron
    is_dense_norm = ".linear_fc1.layer_norm_" in name  # fused into the MLP, which layers with experts have not
    if is_dense_norm and layer in sizes.moe_layers:
        name = rule.megatron
    if rule.is_expert:
        name = name.removesuffix("{local}").replace(".mlp.experts.", ".mlp.experts.experts.")
    return name.format(layer=layer)


def without_layer(key: str) -> str:
    """The key of the tensor that all layers share: "decoder.layers.3.mlp.x" is in "decoder.layers.mlp.x"."""
    head, layers, rest = key.partition("decoder.layers.")
    return head + layers + rest.partition(".")[2] if layers else key


def _outside_layers(rule: WeightRule, shapes: "_Shapes") -> Iterator[Piece]:
    shape = shapes.of_tensor(rule.hf[0], is_sparse=False)
    yield Piece(rule, rule.megatron, shape, (0,) * len(shape), shape, rule.hf, (shape,), None)


def _of_layer(rule: WeightRule, layer: int, shapes: "_Shapes", max_elements: int | None) -> Iterator[Piece]:
    key = stored_key(rule, layer, shapes.sizes)
    is_sparse = layer in shapes.sizes.moe_layers
    of_hf = [shapes.of_tensor(name, is_sparse) for name in rule.hf]
    whole = (sum(shape[0] for shape in of_hf), *of_hf[0][1:])
    parts = [of_hf] if rule.fusion == "qkv" else [[shape] for shape in of_hf]
    first_row = index = 0
    for part in parts:
        rows = sum(shape[0] for shape in part)
        names = tuple(rule.hf[index : index + len(part)])
        offset = (first_row, *(0 for _ in whole[1:]))
        piece = Piece(rule, key, whole, offset, (rows, *whole[1:]), names, tuple(part), layer)
        first_row, index = first_row + rows, index + len(part)
        for cut in _by_experts(piece, shapes.sizes, max_elements) if rule.is_expert else (piece,):
            yield _with_layer_axis(_named(cut), shapes)


def _by_experts(piece: Piece, sizes: ModelSizes, max_elements: int | None) -> Iterator[Piece]:
    assert sizes.num_experts is not None, "a model with expert rules has experts"
    num_experts, one = sizes.num_experts, piece.num_elements
    fitting = num_experts if max_elements is None else max(1, max_elements // one)
    width = max(n for n in range(1, num_experts + 1) if num_experts % n == 0 and n <= fitting)
    for first in range(0, num_experts, width):
        names = tuple(piece.hf[0].replace("{expert}", str(first + i)) for i in range(width))
        yield replace(
            piece,
            whole=(num_experts, *piece.whole),
            offset=(first, *piece.offset),
            shape=(width, *piece.shape),
            hf=names,
            hf_shapes=piece.hf_shapes * width,
        )


def _named(piece: Piece) -> Piece:
    return replace(piece, hf=tuple(name.format(layer=piece.layer) for name in piece.hf))


def _with_layer_axis(piece: Piece, shapes: "_Shapes") -> Piece:
    if not shapes.are_layers_alike:
        return piece
    assert piece.layer is not None
    return replace(
        piece,
        key=without_layer(piece.key),
        whole=(shapes.sizes.num_layers, *piece.whole),
        offset=(piece.layer, *piece.offset),
        shape=(1, *piece.shape),
    )


@dataclass(frozen=True)
class _Shapes:
    """Shapes of Hugging Face tensors by the last parts of their names."""

    sizes: ModelSizes
    are_layers_alike: bool
    by_name: Mapping[str, Shape]

    @classmethod
    def of(cls, hf: HFConfig) -> "_Shapes":
        sizes = model_sizes(hf)
        hidden, head = sizes.hidden_size, sizes.head_dim
        queries, keys = sizes.num_attention_heads * head, sizes.num_key_value_heads * head
        by_name = {
            "embed_tokens.weight": (sizes.vocab_size, hidden),
            "lm_head.weight": (sizes.vocab_size, hidden),
            "q_proj.weight": (queries, hidden),
            "k_proj.weight": (keys, hidden),
            "v_proj.weight": (keys, hidden),
            "q_proj.bias": (queries,),
            "k_proj.bias": (keys,),
            "v_proj.bias": (keys,),
            "o_proj.weight": (hidden, queries),
            "q_norm.weight": (head,),
            "k_norm.weight": (head,),
            "gate.weight": (sizes.num_experts or 0, hidden),
        }
        frequency = family_of(hf).transformer_config(hf).get("moe_layer_freq", 1)
        return cls(sizes, isinstance(frequency, int), by_name)  # Megatron takes a list to mean that they differ

    def of_tensor(self, name: str, is_sparse: bool) -> Shape:
        """Of a tensor, of a layer with experts or without."""
        module, kind = name.split(".")[-2:]
        if module.endswith("norm") and module not in ("q_norm", "k_norm"):
            return (self.sizes.hidden_size,)
        width = self.sizes.moe_intermediate_size if is_sparse else self.sizes.intermediate_size
        of_mlp = {
            "gate_proj": (width, self.sizes.hidden_size),
            "up_proj": (width, self.sizes.hidden_size),
            "down_proj": (self.sizes.hidden_size, width),
        }
        return of_mlp[module] if module in of_mlp else self.by_name[f"{module}.{kind}"]
