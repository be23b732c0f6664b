"""The one weight table: the Hugging Face tensors of each Megatron parameter, their shapes and fusion.

Conversion, weight sync and the planner read it. Names are Hugging Face checkpoint names (one name per expert).
`{layer}` and `{expert}` are global indices. Letters in shapes: H hidden size, V vocabulary, D head size, Q rows
of all query heads, K rows of all key-value heads, O rows of all heads' outputs, I feed-forward width, F expert
width, S width of the shared experts, E number of experts, T number of query heads, 1 one row. For latent
attention: A latent of queries, C latent of keys and values, B this latent plus the rotated part of keys, U rows
of all heads' keys (without the rotated part) and values. G rows of all query heads and their gates. For linear
attention: L rows of all keys (or queries), Z rows of all values (or gates), N number of value heads, X rows
L + L + Z, Y rows X + Z, M rows 2 N, P size of a value, W width of the convolution.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_dppo.architectures.sizes import WIDE_NORM, ModelSizes

Fusion = Literal["one", "qkv", "concatenate", "key heads"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter and the Hugging Face tensors in it.

    Attributes:
        megatron: Parameter name in our layer spec.
        transformer_engine: Parameter name in Transformer Engine's spec, if it differs. There each expert is one
            parameter, and `{local}` counts this rank's experts.
        hf: Checkpoint names, in the order in which they are fused.
        shapes: Shape of each `hf` tensor, of one expert, with a letter for each dimension.
        fusion: "one" for a single unchanged tensor. "concatenate" for concatenation along dimension 0 (gate,
            up). "qkv" for interleaving by key-value group: the group's queries, its key, its value. "key heads"
            for interleaving by key head of linear attention: what belongs to the first head, to the second, ...
        tensor_parallel_dim: Dimension of each *Hugging Face* tensor that tensor parallelism splits. None means
            replicated.
        is_vocabulary: Whether rows are the vocabulary, which Megatron may pad.
        layers: Kinds of layers that have the parameter, if `megatron` names a layer.
        mixers: Kinds of attention of these layers: "softmax", "linear", or "all".
        sections: Letters of the parts of each Hugging Face tensor that are split and interleaved by themselves,
            such as "LLZ" for queries, keys and values. None means that each tensor is one part.
        is_expert: Whether the parameter stacks experts along a leading dimension.
        only_with: Option of `ModelSizes.options` that a model needs to have the parameter. None means always.
        is_buffer: Whether it is a buffer: no gradient, and float32 whatever the model's dtype is.
        may_be_float32: Whether publishers may store it in float32 among weights of another dtype.
            Conversions keep this.
        travels_with: Name of a group. Weight sync sends a group's tensors of one layer in one bucket, because
            engines fuse them within one load, and drop them if they arrive in two.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[str, ...]
    fusion: Fusion = "one"
    tensor_parallel_dim: int | None = None
    is_vocabulary: bool = False
    layers: Literal["all", "dense", "sparse"] = "all"
    mixers: Literal["all", "softmax", "linear"] = "all"
    sections: tuple[str, ...] | None = None
    is_expert: bool = False
    transformer_engine: str | None = None
    only_with: str | None = None
    is_buffer: bool = False
    may_be_float32: bool = False
    travels_with: str | None = None

    def is_of(self, sizes: ModelSizes) -> bool:
        """Whether the model has the parameter."""
        return self.only_with is None or self.only_with in sizes.options

    @property
    def is_in_layers(self) -> bool:
        """Whether each layer has the parameter."""
        return "{layer}" in self.megatron

    def is_in(self, layer: int, sizes: ModelSizes) -> bool:
        """Whether a layer (0-based) has the parameter."""
        is_sparse = layer in sizes.moe_layers
        is_of_kind = self.layers in ("all", "sparse" if is_sparse else "dense")
        is_mixed_so = self.mixers in ("all", "linear" if layer in sizes.linear_layers else "softmax")
        return self.is_in_layers and is_of_kind and is_mixed_so and self.is_of(sizes)

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector, or a stack of experts' vectors: norms and biases, which do not decay."""
        return all(len(shape) == 1 for shape in self.shapes)

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of several Hugging Face tensors, or of their sections, alternate in the parameter."""
        return self.fusion in ("qkv", "key heads")

    def section_rows(self, sizes: ModelSizes) -> list[list[int]]:
        """Return the rows of each section of each Hugging Face tensor."""
        sections = self.sections or tuple(shape[0] for shape in self.shapes)
        return [[sizes.dimensions[letter] for letter in letters] for letters in sections]

    def hf_shapes(self, sizes: ModelSizes) -> tuple[Shape, ...]:
        """Return the shape of each Hugging Face tensor, in the order of `hf`."""
        return tuple(tuple(sizes.dimensions[letter] for letter in shape) for shape in self.shapes)


MEGATRON_LAYER = "decoder.layers.{layer}."


def layer_rule(
    ours: str, theirs: str | Sequence[str], shapes: str | Sequence[str], split: int | None = None, **more: Any
) -> WeightRule:
    """Return the rule of a layer's parameter.

    Args:
        ours: Megatron's name in the layer.
        theirs: Checkpoint names in the layer.
        shapes: Shape of each, in letters; one for all of them if it is a text.
        split: `tensor_parallel_dim`.
        more: Other fields.
    """
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    letters = (shapes,) * len(names) if isinstance(shapes, str) else tuple(shapes)
    hf = tuple(f"model.layers.{{layer}}.{name}" for name in names)
    return WeightRule(MEGATRON_LAYER + ours, hf, letters, tensor_parallel_dim=split, **more)


_VOCABULARY: dict[str, Any] = {"tensor_parallel_dim": 0, "is_vocabulary": True}
EMBEDDING = WeightRule(
    "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ("VH",), **_VOCABULARY
)
OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), ("VH",), **_VOCABULARY)
_FINAL_NORM = WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",), ("H",))
_INPUT_NORM = layer_rule("input_layernorm.weight", "input_layernorm.weight", "H")
_MLP_NORM = layer_rule(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    "H",
    transformer_engine=MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight",  # of dense layers
)
_A = "self_attention."
_ATTENTION_OUTPUT = layer_rule(_A + "linear_proj.weight", "self_attn.o_proj.weight", "HO", 1)
_QKV = [f"self_attn.{x}_proj.weight" for x in "qkv"]
BACKBONE = (
    EMBEDDING,
    _FINAL_NORM,
    replace(_INPUT_NORM, transformer_engine=MEGATRON_LAYER + _A + "linear_qkv.layer_norm_weight"),
    _MLP_NORM,
    layer_rule(_A + "linear_qkv.weight", _QKV, ("QH", "KH", "KH"), 0, fusion="qkv"),
    _ATTENTION_OUTPUT,
)
_QKV_BIASES = [f"self_attn.{x}_proj.bias" for x in "qkv"]
QKV_BIAS = (layer_rule(_A + "linear_qkv.bias", _QKV_BIASES, ("Q", "K", "K"), 0, fusion="qkv"),)
QK_NORM = tuple(layer_rule(_A + f"{x}_layernorm.weight", f"self_attn.{x}_norm.weight", "D") for x in "qk")
WIDE_QK_NORM = tuple(
    replace(rule, shapes=(shape,), tensor_parallel_dim=0, only_with=WIDE_NORM)
    for rule, shape in zip(QK_NORM, "QK", strict=True)
)
GATED_BACKBONE = (
    EMBEDDING,
    _FINAL_NORM,
    _INPUT_NORM,
    _MLP_NORM,
    layer_rule(_A + "linear_qkv.weight", _QKV, ("GH", "KH", "KH"), 0, fusion="qkv", mixers="softmax"),
    replace(_ATTENTION_OUTPUT, mixers="softmax"),
    *(replace(rule, mixers="softmax") for rule in QK_NORM),
)
"""Replacement of BACKBONE and QK_NORM for models with gated attention in some layers, DELTA_NET in others."""
_L = "linear_attn."
_HEADS: dict[str, Any] = {"fusion": "key heads", "mixers": "linear"}
_OF_LINEAR: dict[str, Any] = {"mixers": "linear"}
DELTA_NET = (
    layer_rule(_A + "conv_weight", _L + "conv1d.weight", "X1W", 0, sections=("LLZ",), **_HEADS),
    layer_rule(_A + "A_log", _L + "A_log", "N", 0, may_be_float32=True, **_OF_LINEAR),
    layer_rule(_A + "dt_bias", _L + "dt_bias", "N", 0, **_OF_LINEAR),
    layer_rule(_A + "norm_weight", _L + "norm.weight", "P", may_be_float32=True, **_OF_LINEAR),
    layer_rule(_A + "out_proj.weight", _L + "out_proj.weight", "HZ", 1, **_OF_LINEAR),
)
"""Gated DeltaNet without its projections in, whose checkpoint names differ between families."""
DELTA_NET_IN_PROJ = layer_rule(
    _A + "in_proj.weight", [_L + f"in_proj_{name}.weight" for name in ("qkvz", "ba")], ("YH", "MH"), 0, **_HEADS
)
"""Its projections in, in checkpoints that store each key head's rows together."""
DELTA_NET_SPLIT_IN_PROJ = layer_rule(
    _A + "in_proj.weight",
    [_L + f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")],
    ("XH", "ZH", "NH", "NH"),
    0,
    sections=("LLZ", "Z", "N", "N"),
    **_HEADS,
)
"""The same in checkpoints that store queries of all heads, then keys of all heads, and so on."""


def _feed_forward(
    ours: Sequence[str],
    theirs: str,
    letter: str,
    layers: str,
    engine: Sequence[str | None] = (None, None),
    **more: Any,
) -> tuple[WeightRule, WeightRule]:
    """Return the rules of gate and up, and of down, of a feed-forward with the width of this letter."""
    gate_up = [f"{theirs}{name}_proj.weight" for name in ("gate", "up")]
    options: dict[str, Any] = {"layers": layers, **more}
    return (
        layer_rule(
            ours[0], gate_up, f"{letter}H", 0, fusion="concatenate", transformer_engine=engine[0], **options
        ),
        layer_rule(
            ours[1], theirs + "down_proj.weight", f"H{letter}", 1, transformer_engine=engine[1], **options
        ),
    )


DENSE_MLP = _feed_forward(("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"), "mlp.", "I", "dense")
MOE_MLP = (
    layer_rule("mlp.router.weight", "mlp.gate.weight", "EH", layers="sparse"),
    *_feed_forward(
        ("mlp.experts.fc1_weight", "mlp.experts.fc2_weight"),
        "mlp.experts.{expert}.",
        "F",
        "sparse",
        [f"{MEGATRON_LAYER}mlp.experts.linear_{name}.weight{{local}}" for name in ("fc1", "fc2")],
        is_expert=True,
    ),
)
EXPERT_BIAS = layer_rule(
    "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", "E", layers="sparse", is_buffer=True
)
"""Bias added to a sigmoid router's selection scores, but not to the experts' weights."""
SHARED_EXPERTS = "shared experts"
SHARED_MLP = _feed_forward(
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight"),
    "mlp.shared_experts.",
    "S",
    "sparse",
    only_with=SHARED_EXPERTS,
)
SHARED_GATE = layer_rule(
    "mlp.shared_experts.gate_weight",
    "mlp.shared_expert_gate.weight",
    "1H",
    layers="sparse",
    only_with=SHARED_EXPERTS,
)
"""Gate of the shared experts: a sigmoid weight for each token."""
QUERY_RANK, NO_QUERY_RANK = "query rank", "no query rank"


def _latent(ours: str, theirs: str, shape: str, only_with: str | None = None) -> WeightRule:
    """Return the rule of a projection: down to a latent (replicated), or up to the heads (split)."""
    is_down = ours.endswith("down_proj")
    return layer_rule(
        f"{_A}linear_{ours}.weight",
        f"self_attn.{theirs}.weight",
        shape,
        None if is_down else 0,
        only_with=only_with,
        travels_with="latents" if is_down else None,
    )


LATENT_BACKBONE = (
    EMBEDDING,
    _FINAL_NORM,
    _INPUT_NORM,
    _MLP_NORM,
    _latent("q_proj", "q_proj", "QH", NO_QUERY_RANK),
    _latent("q_down_proj", "q_a_proj", "AH", QUERY_RANK),
    _latent("kv_down_proj", "kv_a_proj_with_mqa", "BH"),
    layer_rule(
        _A + "q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "A",
        transformer_engine=MEGATRON_LAYER + _A + "linear_q_up_proj.layer_norm_weight",
        only_with=QUERY_RANK,
    ),
    layer_rule(
        _A + "kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "C",
        transformer_engine=MEGATRON_LAYER + _A + "linear_kv_up_proj.layer_norm_weight",
    ),
    _latent("q_up_proj", "q_b_proj", "QA", QUERY_RANK),
    _latent("kv_up_proj", "kv_b_proj", "UC"),
    _ATTENTION_OUTPUT,
)
"""Replacement of BACKBONE for models with multi-head latent attention."""


VECTOR = "is_vector"
"""Mark of a model's parameters: `WeightRule.is_vector`."""
ADAPTER_SUFFIX = "_lora"
"""Suffix of the names of modules with LoRA parameters, which have no rules."""


def is_adapter(megatron_name: str) -> bool:
    """Whether a parameter belongs to LoRA, and not to the base model."""
    return f"{ADAPTER_SUFFIX}." in megatron_name


def is_weight_buffer(name: str) -> bool:
    """Whether a tensor of a Megatron model is a buffer that checkpoints contain: a router's expert bias."""
    return name.endswith("mlp.router.expert_bias")


def rename(rule: WeightRule, names: Mapping[str, str]) -> WeightRule:
    """Return the rule with other parts of Hugging Face names: our part, and the checkpoint's."""
    renamed = rule.hf
    for ours, theirs in names.items():
        renamed = tuple(name.replace(ours, theirs) for name in renamed)
    return replace(rule, hf=renamed)


def linears_of(rule: WeightRule) -> tuple[str, ...]:
    """Return the last name parts of a parameter's Hugging Face linears that LoRA can adapt; often empty."""
    is_linear = re.search(r"_proj(_with_mqa)?\.weight$", rule.hf[0]) is not None
    return tuple(name.split(".")[-2] for name in rule.hf) if is_linear else ()


@dataclass(frozen=True)
class WeightEntry:
    """A parameter of a concrete model, resolved against the table."""

    rule: WeightRule
    layer: int | None
    is_one_expert: bool = False  # one of this rank's experts, as in Transformer Engine's spec, and not a stack

    @property
    def name(self) -> str:
        """Name of the parameter in our layer spec."""
        return self.rule.megatron.format(layer=self.layer)

    def hf_names(self, expert: int | None = None) -> tuple[str, ...]:
        """Return checkpoint names, of one expert if the parameter stacks experts."""
        return tuple(name.format(layer=self.layer, expert=expert) for name in self.rule.hf)
