"""Causal attention over packed sequences without padding, by PyTorch's flash attention (`varlen_attn`).

Flash attention takes concatenated sequences, with the first row of each. If a sequence has more keys than
queries, its causal mask aligns the last query with the last key ("bottom-right", see its
`mask.h`): query i of n sees the keys up to `num_keys - n + i`.

Spans with more keys than queries need nothing else: each is a separate sequence for the kernel. So one call
computes them without a mask, and without reordering queries. The keys of a span must be contiguous:
`seqused_k`, which would let spans share keys, is refused if gradients are needed. Keys that several spans see
are stored once for each of them.

The kernel has no attention sinks. A sink adds exp(sink) to the sum that divides a query's result, so the result
is scaled by sigmoid(log-sum-exp - sink). The kernel's log-sum-exp has no gradient, but its backward pass takes
it as an argument, to compute probabilities, and the result, to multiply it with its gradient. Given the
scaled result and the log-sum-exp with the sink, it returns the gradients of attention with sinks.
"""

import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from megatron_dppo.data.batches.prefixes import RepeatedRows
from megatron_dppo.models.spans import Spans, starts_of

# torch 2.11 has no `enable_gqa`: it passes fewer key-value heads to the same kernel unasked.
_GROUPED_HEADS: dict[str, Any] = (
    dict(enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


@dataclass(frozen=True)
class VarlenSequences:
    """The spans of a micro-batch, as `varlen_attn` takes them."""

    cu_seqlens_q: Tensor  # [P+1] int32 first query of each, and the number of queries
    cu_seqlens_k: Tensor  # [P+1] int32 first key of each, and the number of keys
    max_q: int
    max_k: int
    keys: RepeatedRows | None  # None: the keys in their order, each once

    @classmethod
    def of(cls, spans: Spans) -> "VarlenSequences":
        """Return the spans as sequences of the kernel, on the host."""
        return cls(
            starts_of(spans.num_queries),
            starts_of(spans.num_keys),
            int(spans.num_queries.max()),
            int(spans.num_keys.max()),
            spans.keys,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention inside each of the packed sequences.

        Args:
            query: [T', heads, D], float16 or bfloat16 on a GPU.
            key: [T, key-value heads, D], in the order in which context-parallel ranks gather them.
            value: [T, key-value heads, D of values], likewise.
            scale: Factor on the scores; `None` means 1/sqrt(D).
            window: Most keys that a query sees, its own included; `None` means all.
            sinks: [heads] score of a further key of each head, which has no value; `None` means no such key.

        Returns:
            [T', heads, D of values].
        """
        if self.keys is not None:
            key, value = self.keys.take(key), self.keys.take(value)
        head_dim, value_head_dim = query.shape[-1], value.shape[-1]
        if head_dim != value_head_dim:  # the kernel supports one size: zeros change no score and no sum
            scale = head_dim**-0.5 if scale is None else scale
            query, key, value = (
                F.pad(x, (0, max(head_dim, value_head_dim) - x.shape[-1])) for x in (query, key, value)
            )
        places = (self.cu_seqlens_q, self.cu_seqlens_k, self.max_q, self.max_k)
        causal: Any = dict(window_size=(-1 if window is None else window - 1, 0), scale=scale)
        if sinks is None:
            attended = varlen_attn(query, key, value, *places, **causal, **_GROUPED_HEADS)
        else:
            attended = _AttentionWithSinks.apply(query, key, value, sinks, places, causal)
        return cast(Tensor, attended)[..., :value_head_dim]


class _AttentionWithSinks(torch.autograd.Function):
    """Flash attention with a sink of each head, see the head of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        places: tuple[Tensor, Tensor, int, int],
        causal: dict[str, Any],
    ) -> Tensor:
        options: Any = causal | _GROUPED_HEADS
        options["return_aux"] = AuxRequest(lse=True)
        plain, statistics = varlen_attn(query, key, value, *places, **options)
        assert statistics.shape == (query.shape[1], query.shape[0]), "[heads, T']"
        own = sinks.to(statistics)[:, None]
        with_sinks = torch.logaddexp(statistics, own)
        result = (plain * (statistics - with_sinks).exp().T[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, with_sinks, *places[:2])
        ctx.longest, ctx.causal = places[2:], causal
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, with_sinks, *starts = ctx.saved_tensors
        gradient, window = gradients[0].contiguous(), list(ctx.causal["window_size"])
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            *(gradient, query, key, value, result, with_sinks, *starts, *ctx.longest),
            window == [-1, 0],
            torch.zeros(2, dtype=torch.uint64, device=query.device),  # of no dropout
            ctx.causal["scale"],
            window,
        )
        shares = (sinks.to(with_sinks)[:, None] - with_sinks).exp()  # [heads, T']
        products = (gradient.to(shares) * result.to(shares)).sum(-1).T
        return *of_inputs, -(shares * products).sum(-1).to(sinks.dtype), None, None
