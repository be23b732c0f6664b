"""Forward and backward of packed micro-batches through Megatron's schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dppo.types import Microbatch

# From the logits [T, V] of a micro-batch: (sum of the loss, number of learning tokens, what to report).
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, Tensor, dict[str, Any]]]


def run_microbatches(
    model: torch.nn.Module,
    microbatches: Sequence[Microbatch],
    loss_function: LossFunction,
    *,
    before_forward: Callable[[Microbatch], None] | None = None,
    forward_only: bool = False,
) -> None:
    """Accumulate gradients over the micro-batches; Megatron divides by the global number of learning tokens.

    Args:
        model: The Megatron model, wrapped for data parallelism.
        microbatches: On the model's device; as many on every rank.
        loss_function: Called with the logits of each micro-batch.
        before_forward: Called with each micro-batch before it is forwarded (routes are set here).
        forward_only: No gradients.
    """

    def forward_step(data: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(data)
        if before_forward is not None:
            before_forward(microbatch)
        logits = packed_logits(chunk, microbatch)
        return logits, lambda output: loss_function(output, microbatch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=[model],
        num_microbatches=len(microbatches),
        seq_length=max(m.tokens.numel() for m in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def packed_logits(model: torch.nn.Module, microbatch: Microbatch) -> Tensor:
    """[T, V] logits of packed sequences."""
    longest = microbatch.max_seqlen
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    logits = model(microbatch.tokens[None], microbatch.position_ids[None], None, packed_seq_params=packing)
    return logits[0]


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The micro-batch with every tensor on `device`."""
    return _move(microbatch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    return value
