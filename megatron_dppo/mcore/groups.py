"""Megatron's process groups for a layout, and this rank's place in them."""

import contextlib
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.kernels.shards import VocabShard


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """Return the layout as TransformerConfig fields, with those that Megatron needs to be right under it."""
    return dict(
        **_sizes_of_layout(layout),
        sequence_parallel=layout.tensor > 1,
        variable_seq_lengths=layout.pipeline > 1,  # micro-batches are as long as what was packed into them
        # Interleaved stages give wrong gradients with batched sends.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
    )


def initialize_groups(layout: Layout, seed: int, timeout_s: float = 1800.0) -> None:
    """Create Megatron's process groups unless they exist for this layout, and reset its random tracker.

    Collectives of new groups wait `timeout_s` at most.
    """
    sizes = _sizes_of_layout(layout)
    if not parallel_state.model_parallel_is_initialized() or sizes != _sizes_of_groups():
        _destroy_groups()
        timeout_minutes: Any = timeout_s / 60  # annotated as int, and given to timedelta as it is
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=timeout_minutes)
    model_parallel_cuda_manual_seed(seed + 1)


def _sizes_of_layout(layout: Layout) -> dict[str, Any]:
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )


def _sizes_of_groups() -> dict[str, int | None]:
    return dict(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _destroy_groups() -> None:
    """Destroy Megatron's process groups with their threads; Megatron itself only forgets them."""
    groups: list[Any] = getattr(parallel_state, "_global_process_group_list", None) or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # None means the default group
            with contextlib.suppress(ValueError):  # a few it does destroy
                dist.destroy_process_group(group)


def vocab_shard(vocab_size: int) -> VocabShard:
    """Return the columns of the logits that this rank has."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    width = -(-vocab_size // size)
    group: Any = parallel_state.get_tensor_model_parallel_group() if size > 1 else None
    return VocabShard(width * parallel_state.get_tensor_model_parallel_rank(), vocab_size, group)


def is_last_stage() -> bool:
    """Return whether this rank computes logits and losses."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def context_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that share this rank's sequences; None without context parallelism."""
    size = parallel_state.get_context_parallel_world_size()
    group: Any = parallel_state.get_context_parallel_group() if size > 1 else None
    return group


def reports_its_tokens() -> bool:
    """Return whether this rank, alone among the ranks that compute the same losses, reports them."""
    return is_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def speaks_for_its_group() -> bool:
    """Return whether this rank alone reports on its data-parallel group's whole micro-batches."""
    return reports_its_tokens() and parallel_state.get_context_parallel_rank() == 0


def data_parallel_place() -> tuple[int, int]:
    """Return (rank, size) of this rank among the data-parallel ranks."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def sequence_parallel_rows(num_tokens: int) -> slice:
    """Return the tokens of this context-parallel rank that this tensor-parallel rank's routers see."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    own, rank = num_tokens // size, parallel_state.get_tensor_model_parallel_rank()
    return slice(rank * own, (rank + 1) * own)


def sum_over_tokens_and_stages(values: Tensor, *, over_tensor: bool = False) -> Tensor:
    """Sum a micro-batch's values over context-parallel ranks and pipeline stages, on each of them.

    `over_tensor` adds tensor-parallel ranks, whose routers see different tokens.
    """
    groups: list[Any] = [
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]
    if over_tensor:
        groups.append(parallel_state.get_tensor_model_parallel_group())
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(values, group=group)
    return values


def with_summed_gradient(factor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the factor with its gradient summed over the group, each rank of which has a part of it."""
    return cast(Tensor, _SummedGradient.apply(factor, group))


class _SummedGradient(torch.autograd.Function):
    """Sums a gradient over ranks; Megatron's own leaves one that is not contiguous unsummed."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
