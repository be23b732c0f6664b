"""Estimates the bytes that a transformer layer keeps for backward, per micro-batch, module by module.

The lists follow our torch layer spec. Tests compare its figures on a CPU ("torch-cpu") with the tensors that
autograd really saves. On a GPU ("torch") PyTorch's RMSNorm is fused and keeps only its input. Half-precision
attention is flash attention without padding. Traced steps verify both within 5 %. Transformer Engine ("te")
also fuses the activation functions; its figures come from its sources and are not measured.
Latent attention: Megatron normalises the latents, projects them up to full queries, keys and values, and keeps
these. Only an engine's cache stores latents instead. Flash attention needs one head size: values with a smaller
one than queries are padded with zeros, and the kept result has the padded width.
Letters: e bytes of an activation, H hidden size, D head dimension, F expert width, I feed-forward width.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import LayerKind, ModelShape
from megatron_dppo.architectures.sizes import (
    BIASED_EXPERTS,
    DELTA_CHUNK,
    OUTPUT_GATE,
    WIDE_NORM,
    ZERO_CENTRED,
)
from megatron_dppo.architectures.weight_map import EXPERT_BIAS, SHARED_GATE
from megatron_dppo.plan.job import EXPECTED, Assumptions, LayerSpec, Recompute

WORKING_COPIES = 3
"""Temporary tensors of a layer's widest size in its forward or backward pass, in addition to kept ones."""
FLOAT, INDEX = 4, 8
RULE_NUMBERS = 8
"""Numbers of a token and head that the gated delta rule keeps: decays, rates and norms."""


@dataclass(frozen=True)
class LayerTokens:
    """Token counts of one micro-batch on one rank."""

    attended: int  # after context parallelism; the input of attention and split matrices
    sequence: int  # this rank's share of `attended` under sequence parallelism
    repeated: int = 0  # attention's keys if prefixes are shared: a prefix's keys once per sample

    @classmethod
    def of(cls, microbatch_tokens: int, layout: Layout, repeated: int = 0) -> "LayerTokens":
        """Return this rank's part of a micro-batch with this number of tokens, and of repeated keys."""
        attended = math.ceil(microbatch_tokens / layout.context)
        return cls(attended, math.ceil(attended / layout.tensor), repeated)


@dataclass(frozen=True)
class Operands:
    """Columns of core attention's inputs and outputs, for all heads of a tensor rank."""

    queries: int
    keys: int
    values: int
    result: int  # kept in addition to the input of the output projection


@dataclass(frozen=True)
class LayerModel:
    """Sizes and options that determine the bytes that a layer keeps."""

    shape: ModelShape
    layout: Layout
    tokens: LayerTokens
    dtype_bytes: int
    spec: LayerSpec = "torch"
    assumptions: Assumptions = EXPECTED

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one [tokens, H] hidden state of the residual stream."""
        return self.tokens.sequence * self.shape.sizes.hidden_size * self.dtype_bytes

    def norm(self, num_rows: int, width: int) -> int:
        """Return an RMSNorm's bytes: its input, and a float32 per row; on a CPU input and result in float32.

        Norms of 1 + weight read their input in float32 everywhere.
        """
        is_wide = ZERO_CENTRED in self.shape.sizes.options
        per_row = (FLOAT if is_wide else self.dtype_bytes) * width
        if self.spec == "torch-cpu":
            per_row = 2 * FLOAT * width
        return num_rows * (per_row + FLOAT)

    def head_norms(self) -> int:
        """Return the bytes of the norms of queries and keys, with the tensors that hold their inputs."""
        sizes, rows, e = self.shape.sizes, self.tokens.attended, self.dtype_bytes
        if not self.shape.has_qk_norm:
            return 0
        heads = sizes.num_attention_heads // self.layout.tensor
        groups = sizes.num_key_value_heads // self.layout.tensor
        if WIDE_NORM in sizes.options:  # inputs, normed ones before the weights, and three numbers of each norm
            kept = rows * ((heads + groups) * sizes.head_dim * 2 * e + 2 * 3 * FLOAT)
        else:
            kept = self.norm(rows * heads, sizes.head_dim) + self.norm(rows * groups, sizes.head_dim)
        is_copied = self.spec != "torch" or groups > 1  # the queries of one group lie in a row in qkv
        # If the casts are kept, the keys' source is not kept. Otherwise keys are a view of qkv.
        rest = 0 if self.is_head_norm_cast else (heads * is_copied + groups) * sizes.head_dim
        return kept + rows * rest * e

    @property
    def is_norm_cast(self) -> bool:
        """Whether norms keep their inputs cast to float32: in half precision, on a CPU or by definition."""
        is_wide = self.spec == "torch-cpu" or ZERO_CENTRED in self.shape.sizes.options
        return is_wide and self.dtype_bytes < FLOAT

    @property
    def is_head_norm_cast(self) -> bool:
        """Whether norms of heads do. Norms over all heads never do."""
        return self.is_norm_cast and WIDE_NORM not in self.shape.sizes.options

    @property
    def is_flash(self) -> bool:
        """Whether our spec uses flash attention: on a GPU, in half precision."""
        return self.spec == "torch" and self.dtype_bytes < FLOAT

    @property
    def attended_keys(self) -> int:
        """Keys that this rank attends to with flash attention, summed over pieces with context parallelism."""
        context = self.layout.context
        if self.tokens.repeated:
            return self.tokens.repeated
        return self.tokens.attended if context == 1 else self.tokens.attended * (2 * context + 1) // 2

    @property
    def operands(self) -> Operands:
        """Columns of core attention's inputs and outputs, of this rank's heads."""
        sizes = self.shape.sizes
        if sizes.latent is not None:
            return _latent_operands(self)
        queries = sizes.num_attention_heads // self.layout.tensor * sizes.head_dim
        group = sizes.num_key_value_heads // self.layout.tensor * sizes.head_dim
        return Operands(queries, group, group, 0 if self.is_flash else queries)

    def core_attention(self) -> int:
        """Return the bytes of queries, keys, values and log-sum-exp; and of padded batches' own result."""
        sizes, rows, e, of = self.shape.sizes, self.tokens.attended, self.dtype_bytes, self.operands
        statistics = rows * sizes.num_attention_heads // self.layout.tensor * FLOAT
        if self.is_flash and self.attended_keys == rows and sizes.latent is None:
            return self.core_attention_inputs() + statistics
        if self.is_flash:
            of_keys = self.attended_keys * (of.keys + of.values)
            return (rows * (of.queries + of.result) + of_keys) * e + statistics
        keys = (of.keys + of.values) * self.layout.context
        if self.spec == "te":
            return rows * (of.queries + keys) * e + statistics
        padded = rows * (of.queries + keys + of.result) * e + statistics
        return int(padded * self.assumptions.attention_padding)

    def core_attention_inputs(self) -> int:
        """Return the bytes kept when core attention is recomputed: its inputs, values as a view of qkv."""
        sizes = self.shape.sizes
        if sizes.latent is not None:
            return _latent_core_attention_inputs(self)
        heads, groups = sizes.num_attention_heads, sizes.num_key_value_heads
        columns = (2 * heads + 3 * groups) * sizes.head_dim // self.layout.tensor
        shared = (heads + 2 * groups) * sizes.head_dim // self.layout.tensor
        if OUTPUT_GATE in sizes.options:  # in the same matrix as the queries
            columns, shared = (n + heads * sizes.head_dim // self.layout.tensor for n in (columns, shared))
        is_kept_by_norm = self.shape.has_qk_norm and not self.is_head_norm_cast
        return self.tokens.attended * (columns - shared * is_kept_by_norm) * self.dtype_bytes

    def attention(self) -> int:
        """Return the bytes of norm, qkv's input, norms of heads or latents, and the projection's inputs."""
        sizes, rows, e = self.shape.sizes, self.tokens.attended, self.dtype_bytes
        result = sizes.num_attention_heads // self.layout.tensor * sizes.value_head_dim * e
        gated = 2 * result * (OUTPUT_GATE in sizes.options)  # the gates, and the result before them
        return self.input_norm() + self.head_norms() + _latents(self) + rows * (result + gated)

    def input_norm(self) -> int:
        """Return the bytes of the norm before attention, with the result."""
        return self.norm(self.tokens.sequence, self.shape.sizes.hidden_size) + self.hidden_bytes

    def linear_attention(self) -> int:
        """Return the bytes of norm, projected inputs, and the projection's input; the rest is recomputed."""
        linear = self.shape.sizes.linear
        assert linear is not None, "the layer has linear attention"
        result = self.tokens.attended * linear.value_width // self.layout.tensor * self.dtype_bytes
        return self.input_norm() + self.projected() + result

    def projected(self) -> int:
        """Return the bytes of linear attention's projected inputs."""
        dimensions = self.shape.sizes.dimensions
        columns = (dimensions["Y"] + dimensions["M"]) // self.layout.tensor
        return self.tokens.attended * columns * self.dtype_bytes

    def delta_rule(self) -> int:
        """Return the bytes that linear attention keeps while its backward pass computes it again.

        Each value head has: seven tensors of a key's width and three of a value's in the rule, with five of a
        chunk's and a state for each chunk; five of a value's width in the gated norm.
        """
        linear, e = self.shape.sizes.linear, self.dtype_bytes
        if linear is None:
            return 0
        keys, values = linear.key_head_dim, linear.value_head_dim
        rule = 8 * keys + 3 * values + 5 * DELTA_CHUNK + keys * values // DELTA_CHUNK + RULE_NUMBERS
        norm = values * ((2 if self.spec == "torch-cpu" else 1) + 2)
        of_heads = linear.num_value_heads * ((rule + norm) * FLOAT + 2 * values * e)
        mixed = 2 * linear.key_width + linear.value_width  # the convolution's inputs and outputs
        return self.tokens.attended * (of_heads + 2 * mixed * e) // self.layout.tensor

    @property
    def copies(self) -> int:
        """Number of kept tensors with the width of the feed-forward."""
        # fc1's output counts 2. Then follow the fused product (1), or silu(gate), up and their product (3).
        if BIASED_EXPERTS in self.shape.sizes.options:
            return 8  # clamped gate, its sigmoid, both multiplied, up + 1, all three multiplied, and weighted
        return 3 if self.spec == "te" else 5

    def dense_mlp(self, width: int) -> int:
        """Return the bytes inside a feed-forward of all tokens: fc1's result, and the gated activation."""
        return self.tokens.attended * self.copies * (width // self.layout.tensor) * self.dtype_bytes

    def experts(self) -> int:
        """Return the bytes inside the MoE layer: routing maps, dispatched tokens, and activations."""
        sizes, layout, e = self.shape.sizes, self.layout, self.dtype_bytes
        width = sizes.moe_intermediate_size // layout.expert_tensor
        of_biases = 0  # which experts' each row gets, also weighted
        if BIASED_EXPERTS in sizes.options:
            of_biases = (sizes.num_experts or 0) // layout.expert * (2 * e + FLOAT)
        of_row = (sizes.hidden_size + self.copies * width) * e + FLOAT + of_biases
        routed = int(self.expert_rows() * of_row)
        return (
            self.routing() + routed + self.dense_mlp(sizes.shared_expert_intermediate_size) + self.shared_gate()
        )

    def shared_gate(self) -> int:
        """Return the bytes of the shared experts' output, and of the gate weights if there is a gate."""
        is_weighed = SHARED_GATE in self.shape.family.rules
        return self.tokens.sequence * (self.shape.sizes.hidden_size + 1) * self.dtype_bytes * is_weighed

    def routing(self) -> int:
        """Return the bytes of the map of experts, their weights and the indices; and of sigmoid scores."""
        sizes = self.shape.sizes
        num_experts, top_k = sizes.num_experts or 0, sizes.experts_per_token
        of_token = num_experts * (1 + FLOAT) + top_k * (2 * INDEX + FLOAT)
        if EXPERT_BIAS in self.shape.family.rules:
            of_token += (num_experts + top_k + 1) * FLOAT  # all scores, and the chosen ones with their sum
        return self.tokens.sequence * of_token

    def mlp_norm(self) -> int:
        """Return the bytes of the norm after attention, or of the final norm, with the result."""
        return self.norm(self.tokens.sequence, self.shape.sizes.hidden_size) + self.hidden_bytes

    def layer(self, kind: LayerKind, dropped: Iterable[str] = ()) -> int:
        """Return the bytes that one layer keeps, without the recomputed modules."""
        dropped = set(dropped)
        kept = self.mlp_norm() + (self.linear_attention() if kind.is_linear else self.attention())
        if not kind.is_linear:
            kept += self.core_attention_inputs() if "core_attn" in dropped else self.core_attention()
        if kind.is_moe:
            return kept + (0 if "moe" in dropped else self.experts())
        return kept + (0 if "mlp" in dropped else self.dense_mlp(self.shape.sizes.intermediate_size))

    def shared(self) -> int:
        """Return the bytes that all layers keep together: rotary tables in float32, and rows of attention."""
        sizes = self.shape.sizes
        whole = int(sizes.head_dim * sizes.rotary_percent)
        tables = 2 * (whole if sizes.latent is None else sizes.latent.rotary_head_dim) * FLOAT
        rows = self.tokens.attended * (1 + self.layout.context)
        if self.is_flash:  # indices for gathering keys, and for adding up their gradients
            rows = 3 * self.attended_keys if self.attended_keys > self.tokens.attended else 0
        return self.tokens.attended * tables + rows * INDEX

    def working(self) -> int:
        """Return the temporary bytes of one layer's backward: gradients of the widest activations."""
        sizes, layout, e, of = self.shape.sizes, self.layout, self.dtype_bytes, self.operands
        # Queries, keys and values come from one matrix, or keys and values from another one.
        columns = of.queries + of.keys + of.values if sizes.latent is None else of.keys + of.values
        dense = max(2 * sizes.intermediate_size, 2 * sizes.shared_expert_intermediate_size)
        widest = self.tokens.attended * max(columns, dense // layout.tensor) * e
        if sizes.moe_layers:
            widest = max(widest, self.expert_rows() * sizes.hidden_size * e)
        return max(WORKING_COPIES * widest, self.attention_gradients()) + 2 * self.hidden_bytes

    def attention_gradients(self) -> int:
        """Return the temporary bytes of flash attention's backward: per-head gradients of keys and values.

        Also counts the queries' sums in float32, and the gradients of all three; only for our spec.
        """
        of, e = self.operands, self.dtype_bytes
        if not self.is_flash:
            return 0
        by_each_head = 2 * of.queries * (of.queries > of.keys)
        of_keys = self.attended_keys * (by_each_head + of.keys + of.values) * e
        return of_keys + self.tokens.attended * (of.queries * (FLOAT + 2 * e) + of.result * e)

    def expert_rows(self) -> int:
        """Return the tokens that this rank's experts get, each counted for every expert."""
        imbalance = self.assumptions.expert_imbalance if self.layout.expert > 1 else 1.0
        share = self.tokens.sequence * self.shape.sizes.experts_per_token * self.layout.expert_tensor
        return int(share * imbalance)


@dataclass(frozen=True)
class Kept:
    """Bytes of activations of some layers in one micro-batch."""

    held: int  # kept from forward to backward
    again: int  # additional peak while backward recomputes activations


def kept_by_layers(model: LayerModel, layers: range, recompute: Recompute) -> Kept:
    """Return the bytes that the layers of one chunk keep of one micro-batch."""
    kinds = [model.shape.kind(layer) for layer in layers]
    if not kinds:
        return Kept(0, 0)
    size = {kind: model.layer(kind) for kind in set(kinds)}
    whole, shared = [(kind, size[kind]) for kind in kinds], model.shared()
    if recompute.granularity == "none":
        return Kept(shared + _sum(whole), _peak(model, whole) - _sum(whole))
    if recompute.granularity == "selective":
        reduced = [(kind, model.layer(kind, recompute.modules)) for kind in kinds]
        again = max(size[kind] - num_bytes for kind, num_bytes in reduced)
        return Kept(shared + _sum(reduced), max(again, _peak(model, reduced) - _sum(reduced)))
    if recompute.method == "block":
        # The first layers are recomputed. Backward comes to them when the rest is freed.
        num = min(recompute.num_layers, len(kinds))
        inputs, rest = shared + num * model.hidden_bytes, _sum(whole[num:])
        again = max(_peak(model, [layer]) for layer in whole[:num])
        return Kept(inputs + rest, max(again, _peak(model, whole[num:])) - rest)
    groups = [whole[i : i + recompute.num_layers] for i in range(0, len(whole), recompute.num_layers)]
    return Kept(shared + len(groups) * model.hidden_bytes, max(_peak(model, group) for group in groups))


def _sum(layers: Sequence[tuple[LayerKind, int]]) -> int:
    return sum(num_bytes for _, num_bytes in layers)


def _peak(model: LayerModel, layers: Sequence[tuple[LayerKind, int]]) -> int:
    """Return the most bytes from the end of forward to the end of backward, for layers that keep so many."""
    peak = held = _sum(layers)
    for kind, num_bytes in reversed(layers):
        if kind.is_linear:  # what follows the rule in its layer is freed before it is computed again
            before = held - num_bytes + model.input_norm() + model.projected()
            peak = max(peak, before + model.delta_rule())
        held -= num_bytes
    return peak


def _latent_operands(model: LayerModel) -> Operands:
    """Return latent attention's widths on one rank; flash attention pads them to the widest."""
    sizes = model.shape.sizes
    heads = sizes.num_attention_heads // model.layout.tensor
    whole, value = heads * sizes.head_dim, heads * sizes.value_head_dim
    if model.is_flash:
        padded = max(whole, value)
        return Operands(padded, padded, padded, padded * (whole != value))
    return Operands(whole, whole, value, value)


def _latent_core_attention_inputs(model: LayerModel) -> int:
    """Return the bytes kept when core attention is recomputed: queries, keys and values, a tensor each."""
    sizes = model.shape.sizes
    of_head = 2 * sizes.head_dim + sizes.value_head_dim
    heads = sizes.num_attention_heads // model.layout.tensor
    return model.tokens.attended * heads * of_head * model.dtype_bytes


def _latents(model: LayerModel) -> int:
    """Return the bytes of the latents' norms, with the results that the up-projections read."""
    sizes, tokens, e = model.shape.sizes.latent, model.tokens, model.dtype_bytes
    if sizes is None:
        return 0
    kept = sum(
        model.norm(tokens.sequence, width) + tokens.sequence * width * e
        for width in (sizes.query_rank or 0, sizes.rank)
        if width
    )
    # For keys and values, a norm keeps a view that includes the keys' rotated part.
    return kept if model.is_norm_cast else kept + tokens.sequence * sizes.rotary_head_dim * e
