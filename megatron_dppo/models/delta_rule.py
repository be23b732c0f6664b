"""The gated delta rule over packed sequences, chunk by chunk (arXiv 2412.06464), and their causal convolution.

A head's state S [key size, value size] starts at zero in each sequence. A token with query q, key k, value v,
decay exp(g) and rate b makes it `exp(g) S + b k (v - k^T exp(g) S)^T`, and its output is `q^T S`. Tokens of a
chunk are computed together, with the state before it. Chunks of several sequences are computed together too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.architectures.sizes import DELTA_CHUNK as CHUNK
from megatron_dppo.runtime.libraries import delta_rule_kernels


@dataclass(frozen=True)
class Chunks:
    """Chunks of the sequences of a micro-batch, step by step: the first of each sequence, then the second, ...

    It is built once for a micro-batch, on the host. Chunks are padded with zeros. In each step, the sequences
    with a further chunk come in the same order, and the longest come first.
    """

    rows: Tensor  # [T] int64, place of each token among the chunks' rows
    num_active: tuple[int, ...]  # sequences that have a chunk, for each step
    spaced: Tensor
    """[T] int64, place of each token if `gap` rows precede each sequence."""
    num_spaced: int
    gap: int
    cu_seqlens: Tensor  # [S+1] int32, for kernels

    @classmethod
    def of(cls, cu_seqlens: Tensor, conv_width: int) -> "Chunks":
        """Return the chunks of sequences with `cu_seqlens` [S+1], on the host."""
        lengths, gap = cu_seqlens.diff().long(), conv_width - 1
        num_chunks = -(-lengths // CHUNK)
        order = num_chunks.argsort(descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        num_active = [int((num_chunks > step).sum()) for step in range(int(num_chunks.max()))]
        first = torch.tensor([0, *num_active]).cumsum(0)  # chunk of each step
        within = torch.arange(int(lengths.sum())) - cu_seqlens[:-1].long().repeat_interleave(lengths)
        chunk = first[within // CHUNK] + rank.repeat_interleave(lengths)
        gaps = gap * torch.arange(1, len(lengths) + 1)
        spaced = torch.arange(len(within)) + gaps.repeat_interleave(lengths)
        return cls(
            rows=chunk * CHUNK + within % CHUNK,
            num_active=tuple(num_active),
            spaced=spaced,
            num_spaced=len(within) + gap * len(lengths),
            gap=gap,
            cu_seqlens=cu_seqlens.to(torch.int32),
        )

    def of_tokens(self, values: Tensor) -> Tensor:
        """[T, heads, ...] -> [chunks, heads, CHUNK, ...], zero in padding."""
        padded = values.new_zeros(sum(self.num_active) * CHUNK, *values.shape[1:])
        return padded.index_put((self.rows,), values).unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    def to_tokens(self, values: Tensor) -> Tensor:
        """[chunks, heads, CHUNK, D] -> [T, heads, D]."""
        return values.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Compute the rule in float32 or wider. Queries and keys are divided by their norms.

        Args:
            query: [T, heads, key size].
            key: [T, heads, key size].
            value: [T, heads, value size].
            decay: [T, heads] logarithm of the state's factor, at most 0.
            rate: [T, heads] part of the difference between value and prediction that is written, 0 to 1.

        Returns:
            [T, heads, value size], in the dtype of `value`.
        """
        wide = torch.promote_types(value.dtype, torch.float32)
        q, k, v, b = (
            self.of_tokens(x.to(wide)) for x in (_unit(query.to(wide)), _unit(key.to(wide)), value, rate)
        )
        q = q * query.shape[-1] ** -0.5
        total = self.of_tokens(decay.to(wide)).cumsum(-1)  # [chunks, heads, CHUNK] since the chunk's start
        ahead = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(ahead, -torch.inf).exp()
        scores = (q @ k.mT) * between
        written = b.unsqueeze(-1) * k
        # What each token writes, given what the tokens before it in the chunk write: triangular with ones.
        system = (written @ k.mT) * between
        right = torch.cat([b.unsqueeze(-1) * v, written * total.exp().unsqueeze(-1)], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        news, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        q = q * total.exp().unsqueeze(-1)
        k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
        kept = total[..., -1].exp()[..., None, None]
        steps = [part.split(self.num_active) for part in (q, k, news, reads, kept, scores)]
        state = v.new_zeros(self.num_active[0], v.shape[1], k.shape[-1], v.shape[-1])
        outputs: list[Tensor] = []
        for q_now, k_now, news_now, reads_now, kept_now, scores_now in zip(*steps, strict=True):
            state = state[: len(q_now)]
            difference = news_now - reads_now @ state
            outputs.append(q_now @ state + scores_now @ difference)
            state = state * kept_now + k_now.mT @ difference
        return self.to_tokens(torch.cat(outputs)).to(value.dtype)


def causal_convolution(values: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    """Convolve each channel of [T, C] with `weight` [C, 1, W] over the token and the W - 1 before it.

    Tokens before a sequence count as zero.
    """
    padded = values.new_zeros(chunks.num_spaced, values.shape[1]).index_put((chunks.spaced,), values)
    mixed = F.conv1d(padded.T[None], weight, groups=weight.shape[0])[0]
    return mixed.T.index_select(0, chunks.spaced - chunks.gap)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class KernelSequences(Chunks):
    """The same with the kernels of flash-linear-attention.

    On an H200 with torch 2.11 they refused the backward pass, because Triton 3.4 to 3.7.0 compiles it wrongly
    for Hopper. No run has used them yet.
    """

    def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """Return what `Chunks.rule` returns."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]

        each = (x[None].contiguous() for x in (query, key, value, decay, rate))
        starts = self.cu_seqlens.long()
        output, _ = chunk_gated_delta_rule(*each, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
        return output[0]


@cache
def kernel_fault(
    device_type: str, dtype: torch.dtype, num_heads: int, key_size: int, value_size: int
) -> str | None:
    """Try flash-linear-attention's kernels with this rank's heads; return why they cannot be used, if so.

    The first call compiles them, which takes minutes; Triton keeps them in its cache on disk.
    """
    if (fault := delta_rule_kernels(is_on_gpu=device_type == "cuda").fault) is not None:
        return fault
    if dtype == torch.float32:
        return "float32 is for exact comparisons, and the kernels round their factors"
    try:
        is_exact = _is_exact(torch.device(device_type), num_heads, key_size, value_size)
    except Exception as error:  # noqa: BLE001 - compilers and kernels raise anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None if is_exact else "their results are wrong"


def _is_exact(device: torch.device, num_heads: int, key_size: int, value_size: int) -> bool:
    """Compare the kernels with PyTorch operators in float32, gradients too, on three sequences in bfloat16."""
    generator, lengths = torch.Generator(device).manual_seed(0), torch.tensor([3, 2 * CHUNK + 5, CHUNK])
    cu_seqlens, num_tokens = F.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum())
    sizes = [(key_size,), (key_size,), (value_size,), (), (), (value_size,)]
    query, key, value, decay, rate, weight = (
        torch.randn(num_tokens, num_heads, *size, generator=generator, device=device).bfloat16()
        for size in sizes
    )
    inputs = (query, key, value, -F.softplus(decay.float()), rate.sigmoid())

    def results(form: type[Chunks], dtype: torch.dtype) -> list[Tensor]:
        chunks = form.of(cu_seqlens, 1)
        chunks = replace(chunks, rows=chunks.rows.to(device), cu_seqlens=chunks.cu_seqlens.to(device))
        leaves = [x.to(torch.promote_types(x.dtype, dtype)).requires_grad_() for x in inputs]
        output = chunks.rule(*leaves)
        return [output, *torch.autograd.grad(output, leaves, weight.to(output.dtype))]

    pairs = zip(results(KernelSequences, torch.bfloat16), results(Chunks, torch.float32), strict=True)
    return all(torch.dist(found.float(), exact) <= 0.03 * exact.norm() for found, exact in pairs)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call the function, and keep only its arguments for the backward pass, which calls it again."""
    return _Recomputed.apply(function, *tensors)  # type: ignore[no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed: Sequence[bool] = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        found = iter(torch.autograd.grad(output, wanted, gradients[0]))
        return None, *(next(found) if need else None for need in needed)
