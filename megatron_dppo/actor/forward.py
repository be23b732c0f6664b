"""Runs forward and backward of packed micro-batches through Megatron's schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dppo.models.packed_sequences import PackedSequences
from megatron_dppo.types import Microbatch

# From the logits [T, V] of a micro-batch: (sum of the loss, number of learning tokens, what to report).
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, Tensor, dict[str, Any]]]


def run_microbatches(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    loss_function: LossFunction,
    *,
    before_forward: Callable[[int, Microbatch], None] | None = None,
    forward_only: bool = False,
) -> None:
    """Accumulate gradients over the micro-batches; Megatron divides by the global number of learning tokens.

    Args:
        chunks: This rank's part of the Megatron model, wrapped for data parallelism: one per virtual stage.
        microbatches: This rank's tokens of each, on the model's device; as many on every rank.
        loss_function: Called with the logits of each micro-batch, on the last pipeline stage.
        before_forward: Called with a chunk's index and a micro-batch before that chunk forwards it.
        forward_only: No gradients.
    """

    def forward_step(
        data: Iterator[tuple[int, Microbatch]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        index, microbatch = next(data)
        if before_forward is not None:
            before_forward(index, microbatch)
        return forward_packed(chunk, microbatch), lambda output: loss_function(output.squeeze(0), microbatch)

    iterators = [iter([(index, m) for m in microbatches]) for index in range(len(chunks))]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(m.tokens.numel() for m in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def forward_packed(chunk: torch.nn.Module, microbatch: Microbatch) -> Tensor:
    """Return [1, T, V] logits of packed sequences (this rank's columns), or the next stage's hidden states."""
    longest = microbatch.max_seqlen
    is_context_split = parallel_state.get_context_parallel_world_size() > 1
    # Transformer Engine's attention over several ranks asks for both, though nothing lies between sequences.
    padded = microbatch.cu_seqlens if is_context_split else None
    packing = PackedSequences(
        position_ids=microbatch.position_ids,
        qkv_format="thd",
        cu_seqlens_q_padded=padded,  # type: ignore[arg-type]  # none by default
        cu_seqlens_kv_padded=padded,  # type: ignore[arg-type]
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    output: Tensor = chunk(
        microbatch.tokens[None], microbatch.position_ids[None], None, packed_seq_params=packing
    )
    return output


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the micro-batch with every tensor on `device`."""
    return _move(microbatch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    return value
