"""Layers of hybrid models: Gated DeltaNet of packed sequences, gated attention, norms of 1 + weight."""

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dppo.models.attention import PackedSequences
from megatron_dppo.models.delta_rule import (
    Chunks,
    KernelSequences,
    causal_convolution,
    kernel_fault,
    recomputed,
)
from megatron_dppo.models.packed_attention import Spans, starts_of


def chunks_of(config: TransformerConfig, spans: Spans, device_type: str) -> Chunks | None:
    """Return the chunks of complete sequences, on the host; None without linear attention, or for pieces."""
    width = config.linear_conv_kernel_dim
    if config.linear_attention_freq is None or width is None or spans.keys is not None:
        return None
    values, key_size = config.linear_num_value_heads, config.linear_key_head_dim
    assert values and key_size and config.linear_value_head_dim, "the model's family sets them"
    heads = values // config.tensor_model_parallel_size
    fault = kernel_fault(device_type, config.params_dtype, heads, key_size, config.linear_value_head_dim)
    return (KernelSequences if fault is None else Chunks).of(starts_of(spans.num_queries), width)


class ZeroCentredNorm(torch.nn.Module):
    """Root-mean-square norm that multiplies by 1 + weight, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron reads it

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden size]."""
        scale = 1 + self.weight.float()
        return F.rms_norm(hidden.float(), self.weight.shape, scale, self.eps).to(hidden.dtype)


class GatedAttention(SelfAttention):
    """Megatron's attention with an output gate, with the rows of `linear_qkv` in Hugging Face's order.

    A key-value group has each head's query and gate; then its key and its value.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and gates [s, b, heads, head size] of [s, b, hidden size]."""
        parts: Any = self  # Megatron annotates them as protocols that are not callable
        mixed, _bias = parts.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition // groups
        by_group = mixed.unflatten(-1, (groups, 2 * heads + 2, size))
        queries, keys, values = by_group.split([2 * heads, 1, 1], dim=-2)
        query, gate = queries.unflatten(-2, (heads, 2)).flatten(-4, -3).unbind(-2)
        key, value = keys.squeeze(-2), values.squeeze(-2)
        return parts.q_layernorm(query), parts.k_layernorm(key), value, gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply [s, b, heads * head size] by the sigmoid of the gates; Megatron's needs a C++ compiler."""
        return x * torch.sigmoid(gate.reshape(x.shape))


class GatedDeltaNet(torch.nn.Module):
    """Gated DeltaNet over packed sequences; tensor-parallel ranks have some key heads each, with their values.

    Rows of `in_proj` and of the convolution are ordered by key head: its query, key, values, gates, rates and
    decays. Only the projected inputs are kept for the backward pass.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None, "Megatron gives the groups to each layer"
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        width, initial = config.linear_conv_kernel_dim, cast(Any, config)  # whose methods are set, too
        assert keys and values and key_size and value_size and width, "the model's family sets them"
        self.key_size, self.value_size = key_size, value_size
        self.layer_number, self.eps = layer_number, config.layernorm_epsilon
        self.heads, self.ratio = keys // pg_collection.tp.size(), values // keys
        self.of_values = self.ratio * self.value_size  # of one key head
        mixed = 2 * self.key_size + self.of_values
        own, dtype = self.heads * self.ratio, config.params_dtype
        options: dict[str, Any] = dict(
            config=config, bias=False, skip_bias_add=False, is_expert=False, tp_group=pg_collection.tp
        )
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            keys * (mixed + self.of_values + 2 * self.ratio),
            init_method=initial.init_method,
            gather_output=False,
            **options,
        )
        self.out_proj = RowParallelLinear(
            values * self.value_size,
            config.hidden_size,
            init_method=initial.output_layer_init_method,
            input_is_parallel=True,
            **options,
        )
        self.conv_weight = torch.nn.Parameter(torch.zeros(self.heads * mixed, 1, width, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(own, dtype=dtype))
        self.dt_bias = torch.nn.Parameter(torch.zeros(own, dtype=dtype))
        self.norm_weight = torch.nn.Parameter(torch.zeros(self.value_size, dtype=dtype))
        setattr(self.norm_weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron reads it

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSequences | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        """Return [s, b, hidden size], of which this rank has a part, and no bias."""
        assert packed_seq_params is not None and packed_seq_params.chunks is not None, "sequences are complete"
        projected, _bias = self.in_proj(hidden_states)
        weights = self.conv_weight, self.A_log, self.dt_bias, self.norm_weight
        mix = partial(self._mix, packed_seq_params.chunks)
        # A third more time of these parts, and 330 KB less for each token and layer of Qwen3-Next on one GPU.
        output, _bias = self.out_proj(recomputed(mix, projected.squeeze(1), *weights).unsqueeze(1))
        return output, None

    def _mix(
        self, chunks: Chunks, projected: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor
    ) -> Tensor:
        """Return [T, this rank's values] of the projected inputs [T, this rank's columns]."""
        columns = 2 * self.key_size + self.of_values, self.of_values, self.ratio, self.ratio
        by_head = projected.unflatten(-1, (self.heads, -1))  # [T, key heads, columns of one]
        qkv, gates, rates, steps = by_head.split(columns, dim=-1)
        mixed = F.silu(causal_convolution(qkv.flatten(1), conv, chunks)).view(qkv.shape)
        query, key, values = mixed.split((self.key_size, self.key_size, self.of_values), dim=-1)
        query, key = (x.repeat_interleave(self.ratio, dim=1) for x in (query, key))
        value, gate = (x.reshape(len(x), -1, self.value_size) for x in (values, gates))
        decay = -a_log.float().exp() * F.softplus(steps.flatten(1).float() + dt_bias)
        output = chunks.rule(query, key, value, decay, rates.flatten(1).sigmoid())
        normed = F.rms_norm(output.float(), norm.shape, eps=self.eps).to(output.dtype)
        return (norm * normed * F.silu(gate.float())).to(projected.dtype).flatten(1)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients come with the backward pass."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the weights as shards of all heads'."""
        own = dict(self.named_parameters(recurse=False))
        split = {name: 0 for name in own if name != "norm_weight"}
        found = make_sharded_tensors_for_checkpoint(own, prefix, split, sharded_offsets)
        for name in ("in_proj", "out_proj"):
            linear: Any = self.get_submodule(name)
            found |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found
