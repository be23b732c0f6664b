"""Builds Megatron's data parallelism, mixed-precision AdamW and schedule; takes the steps of the optimizer."""

# Megatron has no stubs, and annotates few methods.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_dppo.architectures.weight_map import VECTOR
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import OptimizerConfig
from megatron_dppo.mcore import fixes


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
        return cast(Any, super().forward(*inputs, fp32_output=False, **options))


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


def bad_gradients(chunks: Sequence[DistributedDataParallel]) -> list[str]:
    """Return messages on this rank's gradients that are not finite; if all are finite, this takes one pass."""
    wrapped: list[Any] = list(chunks)
    buffers = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    norms = (cast(Tensor, torch.linalg.vector_norm(b.grad_data, ord=torch.inf)) for b in buffers)
    if all(bool(norm.isfinite()) for norm in norms):
        return []
    parameters: list[tuple[str, Any]] = [
        named for chunk in wrapped for named in chunk.module.named_parameters()
    ]
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    names = [name for name, parameter in trained if not bool(parameter.main_grad.isfinite().all())]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [f"gradient: not finite in {len(names)} tensors ({shown})"]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype
) -> Any:
    """Build Megatron's optimizer over the model's parameters, with float32 master weights for bfloat16.

    Norms and biases do not decay. Megatron would find them by their number of dimensions, and experts' stacked
    biases have two.
    """
    # Megatron's CPU Adam (`optimizer_cpu_offload`) stays off. Without Transformer Engine its precision-aware
    # form raises an error, and its plain form keeps the master weights on the device.
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
    )
    without_decay: Any = {ParamKey(attr=VECTOR): {"wd_mult": 0.0}}  # annotated as tables with all keys
    optimizer = get_megatron_optimizer(settings, list(chunks), without_decay)
    fixes.detach_shards(optimizer)
    return optimizer


def build_schedule(
    optimizer: Any, config: OptimizerConfig, num_steps: int, *, num_done: int = 0
) -> OptimizerParamScheduler:
    """Build the schedule: linear warm-up from 0, then constant, linear or cosine down to min_lr.

    The schedule depends only on the number of steps, so a resumed run rebuilds it. A checkpoint loads the
    parameter groups with the settings of the run that wrote it, so they get the config's settings first.

    Args:
        optimizer: Megatron's; its parameter groups get their settings and learning rate here.
        config: The run's `[optimizer]`.
        num_steps: Gradient steps of the complete run.
        num_done: Gradient steps already taken. Call `.step(1)` after each further one.
    """
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = config.lr, config.min_lr
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
    is_warming_up = config.warmup_steps > 0  # without this the first step would have learning rate 0
    last = num_steps - 1 + is_warming_up  # as the schedule counts the last step, which has min_lr
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=max(last, config.warmup_steps + 1),
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    schedule.step(num_done + is_warming_up)
    return schedule


class _NormNotFinite(Exception):
    """The gradient norm is infinite or NaN."""


def take_step(optimizer: Any) -> tuple[float | None, str | None]:
    """Clip the gradients and update the parameters, unless Megatron finds that it cannot.

    The norm is the root of a float32 sum of squares, which overflows above 1.8e19. Megatron would divide the
    gradients by infinity, and move the weights only by momentum and decay.

    Returns:
        The gradient norm, or None if the parameters were not updated, and then the reason if it is known.
    """
    norm_of = optimizer.get_grad_norm

    def finite_norm() -> float:
        norm = float(norm_of())
        if not math.isfinite(norm):
            raise _NormNotFinite(f"gradient: the norm is {norm}, though each gradient is finite")
        return norm

    optimizer.get_grad_norm = finite_norm
    try:
        is_updated, norm, _ = optimizer.step()
    except _NormNotFinite as error:
        return None, str(error)
    finally:
        del optimizer.get_grad_norm
    return (float(norm), None) if is_updated else (None, None)
