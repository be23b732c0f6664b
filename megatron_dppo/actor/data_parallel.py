"""Wraps the model in Megatron's data parallelism, which sums gradients over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_dppo.config.schema import Config


class _BFloat16Module(Float16Module):
    """Megatron's bfloat16 wrapper without its cast of outputs to float32: the loss casts what it reads.

    Buffers keep their dtype. Megatron would round a router's expert bias, where neighbours of 7.0 are 0.03
    apart, and make it float32 again.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        owners = [(owner, dict(owner._buffers)) for owner in module.modules()]
        super().__init__(config, module)
        for owner, buffers in owners:
            owner._buffers.update(buffers)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, fp32_output=False, **options)


def wrap_for_data_parallelism(
    chunks: Sequence[GPTModel], model_config: TransformerConfig, config: Config
) -> list[DistributedDataParallel]:
    """Wrap the chunks with gradient buffers, and set Megatron's schedule to synchronise them."""
    is_low_precision = model_config.params_dtype == torch.bfloat16
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.optimizer.distributed,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    wrapped = [
        DistributedDataParallel(
            model_config,
            options,
            _BFloat16Module(model_config, chunk) if is_low_precision else chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    model_config.finalize_model_grads_func = finalize_model_grads
    if config.parallel.overlap_grad_reduce:
        schedule: Any = model_config  # which annotates one function, and takes one for each of several chunks
        schedule.no_sync_func = _each([chunk.no_sync for chunk in wrapped])
        if len(wrapped) > 1:
            schedule.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    return wrapped


def _each(functions: list[Any]) -> Any:
    """Return one function for one chunk, and a list for several, as Megatron's schedules expect."""
    return functions[0] if len(functions) == 1 else functions


def complete_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait until this rank has the parameters that others updated; forward passes do so by themselves."""
    for chunk in chunks:
        wrapped: Any = chunk
        if wrapped.ddp_config.overlap_param_gather:
            wrapped.start_param_sync(force_sync=True)


def bad_gradients(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    """Return messages on this rank's gradients that are not finite; if all are finite, this takes one pass."""
    wrapped: list[Any] = list(chunks)
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    if all(bool(torch.linalg.vector_norm(b.grad_data, ord=torch.inf).isfinite()) for b in buffers):
        return []
    parameters: list[tuple[str, Any]] = [
        named for chunk in wrapped for named in chunk.module.named_parameters()
    ]
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    names = [name for name, parameter in trained if not bool(parameter.main_grad.isfinite().all())]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [f"gradient: not finite in {len(names)} tensors ({shown})"]
