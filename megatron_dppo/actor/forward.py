"""Runs forward and backward of packed micro-batches through Megatron's schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dppo.mcore.fixes import release_last_microbatch
from megatron_dppo.models.attention import PackedSequences, attention_form, head_dim_of
from megatron_dppo.types import Microbatch

# From the logits [T, V] of a micro-batch: (sum of the loss, number of learning tokens, what to report).
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, Tensor, dict[str, Any]]]


def run_microbatches(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    loss_function: LossFunction,
    *,
    device: torch.device,
    before_forward: Callable[[int, Microbatch], None] | None = None,
    forward_only: bool = False,
) -> None:
    """Accumulate gradients over the micro-batches; Megatron divides by the global number of learning tokens.

    Args:
        chunks: This rank's part of the Megatron model, wrapped for data parallelism: one per virtual stage.
        microbatches: This rank's tokens of each, on the host; every rank has the same number.
        loss_function: Called with the logits of each micro-batch, on the last pipeline stage.
        device: The model's.
        before_forward: Called with a chunk's index and a micro-batch before that chunk forwards it.
        forward_only: No gradients.
    """

    def forward_step(
        data: Iterator[tuple[int, Microbatch, PackedSequences]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        index, microbatch, packing = next(data)
        if before_forward is not None:
            before_forward(index, microbatch)
        return forward_packed(chunk, microbatch, packing), lambda output: loss_function(
            output.squeeze(0), microbatch
        )

    moved = [(to_device(m, device), packing_of(m, chunks[0], device)) for m in microbatches]
    iterators = [iter([(index, *each) for each in moved]) for index in range(len(chunks))]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(microbatches),
        seq_length=max(m.tokens.numel() for m in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    release_last_microbatch(chunks)


def packing_of(microbatch: Microbatch, chunk: torch.nn.Module, device: torch.device) -> PackedSequences:
    """Build the packing parameters that the layers need, on the host, and move them to `device`.

    Args:
        microbatch: Micro-batch with the `cu_seqlens` of all context-parallel ranks.
        chunk: Chunk of the model; its dtype and head size decide how attention is computed.
        device: The model's.
    """
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    config = get_model_config(chunk)
    form = attention_form(device.type, config.params_dtype, head_dim_of(config))
    return _move(PackedSequences.of(microbatch, rank, size, form), device)


def forward_packed(
    chunk: torch.nn.Module, microbatch: Microbatch, packing: PackedSequences | None = None
) -> Tensor:
    """Return [1, T, V] logits of packed sequences (this rank's columns), or the next stage's hidden states.

    `packing` is the result of `packing_of`, which is called here if `packing` is None.
    """
    packing = packing or packing_of(microbatch, chunk, microbatch.tokens.device)
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
    if isinstance(value, tuple):
        return tuple(_move(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    return value
