"""Builds Megatron's mixed-precision AdamW and its schedule, from `[optimizer]`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dppo.config.schema import OptimizerConfig
from megatron_dppo.mcore import fixes


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], config: OptimizerConfig, dtype: torch.dtype
) -> Any:
    """Build Megatron's optimizer over the model's parameters, with float32 master weights for bfloat16."""
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
    optimizer = get_megatron_optimizer(settings, list(chunks))
    fixes.detach_shards(optimizer)
    return optimizer


def build_schedule(
    optimizer: Any, config: OptimizerConfig, num_steps: int, *, num_done: int = 0
) -> OptimizerParamScheduler:
    """Build the schedule: linear warm-up from 0, then constant, linear or cosine down to min_lr.

    The schedule depends only on the number of steps, so a resumed run rebuilds it. A checkpoint loads the
    parameter groups with the settings of its run, so they get the config's settings first.

    Args:
        optimizer: Megatron's; the settings and the learning rate of its parameter groups are set at once.
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
