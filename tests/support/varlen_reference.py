"""PyTorch's flash attention of packed sequences, written plainly for CPUs: `varlen_attn` itself calls it.

Masks are built as its documentation and flash attention's source have them, scores as matrices in float64. What
the kernels of a GPU would refuse is refused here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def install() -> None:
    """Have PyTorch's operators run on CPUs in this process."""
    operators: Any = varlen
    operators._varlen_attn.register_kernel("cpu", _forward)
    operators._varlen_attn_backward.register_kernel("cpu", _backward)


def is_seen(num_queries: int, num_keys: int, window: list[int]) -> Tensor:
    """[queries, keys] bool: whether a query sees a key; the last of both are aligned."""
    distance = torch.arange(num_queries)[:, None] + (num_keys - num_queries) - torch.arange(num_keys)
    left, right = window
    return ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert seqused_k is None and block_table is None and window_size is not None
    _refuse(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    assert enable_gqa or query.shape[1] == key.shape[1]
    output = torch.full(query.shape, torch.nan, dtype=query.dtype)
    precise = torch.promote_types(query.dtype, torch.float32)
    statistics = torch.full((query.shape[1], query.shape[0]), torch.nan, dtype=precise)
    for queries, keys in _sequences(cu_seq_q, cu_seq_k):
        scores, _ = _scores(query[queries], key[keys], scale, window_size)
        statistics[:, queries] = scores.logsumexp(-1)
        attended = scores.softmax(-1) @ _heads(value[keys], query.shape[1])
        output[queries] = attended.transpose(0, 1).to(query.dtype)
    return output, statistics, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size is not None
    num_heads, num_groups = query.shape[1], key.shape[1]
    found = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (query, key, value)]
    for queries, keys in _sequences(cu_seq_q, cu_seq_k):
        scores, factor = _scores(query[queries], key[keys], scale, window_size)
        q, k, v = (_heads(x, num_heads) for x in (query[queries], key[keys], value[keys]))
        d_out, o = (_heads(x[queries], num_heads) for x in (grad_out, out))
        p = (scores - lse[:, queries, None]).exp()
        d_scores = p * (d_out @ v.transpose(1, 2) - (d_out * o).sum(-1, keepdim=True)) * factor
        parts = (d_scores @ k, d_scores.transpose(1, 2) @ q, p.transpose(1, 2) @ d_out)
        for whole, rows, part in zip(found, (queries, keys, keys), parts, strict=True):
            num = num_heads if rows is queries else num_groups
            whole[rows] = part.unflatten(0, (num, -1)).sum(1).transpose(0, 1).to(whole.dtype)
    return found[0], found[1], found[2]


def _sequences(cu_seq_q: Tensor, cu_seq_k: Tensor) -> list[tuple[slice, slice]]:
    ends = zip(cu_seq_q.tolist(), cu_seq_q[1:].tolist(), cu_seq_k.tolist(), cu_seq_k[1:].tolist(), strict=False)
    return [(slice(start, stop), slice(first, last)) for start, stop, first, last in ends]


def _scores(query: Tensor, key: Tensor, scale: float | None, window: list[int]) -> tuple[Tensor, float]:
    """[heads, queries, keys] float64, and the factor in them."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    num_heads = query.shape[1]
    scores = _heads(query, num_heads) @ _heads(key, num_heads).transpose(1, 2) * factor
    return scores.masked_fill(~is_seen(query.shape[0], key.shape[0], window), -torch.inf), factor


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[rows, groups, D] -> [heads, rows, D] float64."""
    return x.double().transpose(0, 1).repeat_interleave(num_heads // x.shape[1], 0)


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> None:
    for x, cu_seqlens, longest in ((query, cu_q, max_q), (key, cu_k, max_k), (value, cu_k, max_k)):
        assert x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == x.shape[0], "a gradient for each row"
        assert isinstance(longest, int) and longest == int(cu_seqlens.diff().max())
    assert cu_q.shape == cu_k.shape and query.shape[1] % key.shape[1] == 0
