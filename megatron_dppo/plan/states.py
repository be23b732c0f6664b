"""Bytes of parameters, gradient buffers and Adam's states on one rank."""

from dataclasses import dataclass

from megatron_dppo.plan.job import Job
from megatron_dppo.plan.partition import StagePart

GRADIENT_BYTES = 4  # grad_reduce_in_fp32
MASTER_BYTES = 4
HOST_GRADIENT_BYTES = 4  # Megatron's HybridDeviceOptimizer copies each gradient to the host


@dataclass(frozen=True)
class RankStates:
    """Bytes of one rank that do not depend on tokens."""

    parameters: int
    gradients: int
    optimizer: int  # on the GPU, in its step
    optimizer_between: int  # of those, outside of the step
    optimizer_on_host: int
    optimizer_in_checkpoint: int
    step_temporaries: int  # of the optimizer's step on the GPU
    gradient_temporaries: int  # a tensor's gradient before it is added to its buffer


def rank_states(job: Job, part: StagePart) -> RankStates:
    """The states of a rank that holds this part of the model."""
    dtype_bytes, moment_bytes = job.workload.dtype_bytes, job.options.moment_bytes
    is_offloaded, is_parked = job.options.offload_optimizer, job.config.optimizer.offload
    whole = optimizer_bytes(part.shard, dtype_bytes, moment_bytes)
    return RankStates(
        parameters=part.buffer * dtype_bytes,
        gradients=part.buffer * GRADIENT_BYTES,
        optimizer=0 if is_offloaded else whole,
        optimizer_between=0 if is_offloaded or is_parked else whole,
        optimizer_on_host=offloaded_bytes(part.shard, moment_bytes) if is_offloaded else whole * is_parked,
        optimizer_in_checkpoint=whole,
        step_temporaries=0
        if is_offloaded
        else part.shard * GRADIENT_BYTES,  # AdamW's square roots, all at once
        gradient_temporaries=part.largest * dtype_bytes,
    )


def optimizer_bytes(num_elements: int, dtype_bytes: int, moment_bytes: int) -> int:
    """Adam's states: two moments, and a float32 master copy of parameters that are no float32 themselves."""
    master = MASTER_BYTES if dtype_bytes < MASTER_BYTES else 0
    return num_elements * (master + 2 * moment_bytes)


def offloaded_bytes(num_elements: int, moment_bytes: int) -> int:
    """What Adam takes on the host instead: master copy, moments, and the gradients that are sent there."""
    return num_elements * (MASTER_BYTES + 2 * moment_bytes + HOST_GRADIENT_BYTES)
