"""Estimates the bytes of parameters, gradient buffers and Adam's states on one rank."""

from dataclasses import dataclass

from megatron_dppo.plan.job import Job
from megatron_dppo.plan.partition import StagePart

GRADIENT_BYTES = 4  # grad_reduce_in_fp32
MASTER_BYTES = 4
MOMENT_BYTES = 4


@dataclass(frozen=True)
class RankStates:
    """Bytes of one rank that do not depend on tokens."""

    parameters: int
    gradients: int
    optimizer: int  # in its step, and in a checkpoint
    optimizer_between: int  # of those, on the GPU outside of the step
    optimizer_on_host: int  # of those, on the host outside of the step
    step_temporaries: int  # of the optimizer's step on the GPU
    largest_parameter: int
    largest_gradient: int  # before it is added to its buffer


def rank_states(job: Job, part: StagePart) -> RankStates:
    """Return the state bytes of a rank that holds this part of the model."""
    dtype_bytes, is_offloading = job.workload.dtype_bytes, job.config.optimizer.offload
    whole = optimizer_bytes(part.shard, dtype_bytes)
    return RankStates(
        parameters=part.weights * dtype_bytes,
        gradients=part.buffer * GRADIENT_BYTES,
        optimizer=whole,
        optimizer_between=0 if is_offloading else whole,
        optimizer_on_host=whole * is_offloading,
        step_temporaries=part.shard * GRADIENT_BYTES,  # AdamW's square roots, all at once
        largest_parameter=part.largest * dtype_bytes,
        largest_gradient=part.largest_trained * dtype_bytes,
    )


def optimizer_bytes(num_elements: int, dtype_bytes: int) -> int:
    """Return the bytes of Adam's states: two float32 moments, and a float32 copy of other parameters."""
    master = MASTER_BYTES if dtype_bytes < MASTER_BYTES else 0
    return num_elements * (master + 2 * MOMENT_BYTES)
