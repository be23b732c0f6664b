"""Linear attention in torch, token by token, for a server on a CPU: SGLang's kernels of these names.

States are [slots, value heads, value size, key size]; inputs of the convolution [slots, channels, width - 1].
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


def causal_conv1d_fn_cpu(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, conv_states: Any, **given: Any
) -> Any:
    """Convolve the sequences of a prefill [channels, tokens], and keep their last inputs."""
    output, gap = torch.empty_like(x), weight.shape[1] - 1
    slots, has_state = given["cache_indices"].tolist(), given["has_initial_state"].tolist()
    for slot, is_continued, (start, stop) in zip(
        slots, has_state, pairwise(given["query_start_loc"].tolist()), strict=False
    ):
        before = conv_states[slot].to(x) if is_continued else x.new_zeros(x.shape[0], gap)
        inputs = torch.cat([before, x[:, start:stop]], dim=1)
        mixed = F.conv1d(inputs[None], weight[:, None], bias, groups=x.shape[0])[0]
        output[:, start:stop] = mixed if activation is None else F.silu(mixed)
        conv_states[slot] = inputs[:, inputs.shape[1] - gap :].to(conv_states)
    return output


def causal_conv1d_update_cpu(
    x: Any,
    conv_states: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    conv_state_indices: Any,
    **_: Any,
) -> Any:
    """Convolve one token of each sequence [sequences, channels]."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x), x[:, :, None]], dim=2)
    mixed = (inputs * weight).sum(-1)
    mixed = mixed if bias is None else mixed + bias
    conv_states[slots] = inputs[:, :, 1:].to(conv_states)
    return mixed if activation is None else F.silu(mixed)


def fused_gdn_gating_cpu(a_log: Any, a: Any, b: Any, dt_bias: Any, *_: Any) -> tuple[Any, Any]:
    """Return log decays and rates [1, tokens, heads]."""
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    initial_state: Any,
    initial_state_indices: Any,
    cu_seqlens: Any,
    **_: Any,
) -> tuple[Any, None, None]:
    """Return the outputs [1, tokens, heads, size] of a prefill, and keep the states after it."""
    output = torch.empty_like(v)
    query, key = (_unit(x[0].float()).repeat_interleave(v.shape[2] // x.shape[2], dim=1) for x in (q, k))
    for slot, (start, stop) in zip(initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=False):
        state = initial_state[slot].float()
        for t in range(start, stop):
            state = state * g[0, t].float().exp()[:, None, None]
            predicted = torch.einsum("hvk,hk->hv", state, key[t])
            change = beta[0, t].float()[:, None] * (v[0, t].float() - predicted)
            state = state + change[:, :, None] * key[t][:, None]
            output[0, t] = torch.einsum("hvk,hk->hv", state, query[t] * q.shape[-1] ** -0.5).to(v)
        initial_state[slot] = state.to(initial_state)
    return output, None, None


def _unit(x: Any) -> Any:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log: Any, dt_bias: Any, a: Any, b: Any, initial_state_source: Any, **given: Any
) -> Any:
    """Return the outputs of a decoding step, and keep the states after it."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    given |= {"g": g, "beta": beta, "initial_state": initial_state_source}
    return chunk_gated_delta_rule_cpu(**given)[0]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Any, ba: Any, key_heads: int, value_heads: int, key_size: int, value_size: int
) -> tuple[Any, Any, Any, Any]:
    """Split the projected inputs of Qwen3.5: queries, keys and values of all heads; gates; rates; decays."""
    gates = value_heads * value_size
    mixed, z = qkvz.split([2 * key_heads * key_size + gates, gates], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return mixed.contiguous(), z.reshape(-1, value_heads, value_size), b.contiguous(), a.contiguous()


def fused_qk_gemma_rmsnorm_cpu(
    query: Any, key: Any, of_query: Any, of_key: Any, eps: float, size: int
) -> tuple[Any, Any]:
    """Normalise heads of queries and keys, with weights of which 1 is missing."""

    def normed(x: Any, weight: Any) -> Any:
        return F.rms_norm(x.reshape(-1, size).float(), (size,), 1 + weight.float(), eps).to(x)

    return normed(query, of_query), normed(key, of_key)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    query: Any, key: Any, of_query: Any, of_key: Any, eps: float, size: int, num_heads: int
) -> tuple[Any, Any, Any]:
    """The same of queries that are stored with their gates, head by head."""
    query, gate = query.reshape(-1, num_heads, 2 * size).chunk(2, dim=-1)
    return *fused_qk_gemma_rmsnorm_cpu(query, key, of_query, of_key, eps, size), gate.contiguous()


def fused_sigmoid_mul_cpu(x: Any, gate: Any) -> None:
    """Multiply by the gates' sigmoids in place."""
    x.mul_(torch.sigmoid(gate).view(x.shape))


for _operator in (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)
