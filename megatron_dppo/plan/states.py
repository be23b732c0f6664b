"""Estimates the bytes of parameters, gradient buffers and Adam's states on one rank."""

from dataclasses import dataclass

from megatron_dppo.plan.job import Job
from megatron_dppo.plan.partition import StagePart

GRADIENT_BYTES = 4  # grad_reduce_in_fp32
MASTER_BYTES = 4
MOMENT_BYTES = 4
STORED_BYTES = MASTER_BYTES + 2 * MOMENT_BYTES  # of each element in a checkpoint, of float32 parameters too


@dataclass(frozen=True)
class RankStates:
    """Bytes on one rank that do not depend on tokens."""

    parameters: int
    gradients: int
    optimizer: int  # during its step, and in a checkpoint
    optimizer_between: int  # part of `optimizer` on the GPU outside of the step
    optimizer_on_host: int  # part of `optimizer` on the host outside of the step
    checkpoint: int  # copied to the host by an asynchronous save
    checkpoint_pieces: int  # part of `checkpoint` on the host in any save: parameters in several ranks' shards
    step_temporaries: int  # temporary bytes of the optimizer's step on the GPU
    largest_parameter: int
    largest_gradient: int  # before it is added to its buffer


def rank_states(job: Job, part: StagePart) -> RankStates:
    """Return the state bytes of a rank with this part of the model."""
    dtype_bytes, is_offloading = job.workload.dtype_bytes, job.config.optimizer.offload
    whole = optimizer_bytes(part.shard, dtype_bytes)
    is_distributed = job.config.optimizer.distributed
    stored = STORED_BYTES if is_distributed else optimizer_bytes(1, dtype_bytes)
    # A rank writes its shard and at most one more parameter per optimizer: mcore/optimizer_shards.py.
    pieces = (
        is_distributed
        * part.largest_trained
        * sum(each.sharers > 1 for each in (part.dense, part.expert) if each.own)
    )
    owned = min(part.shard + pieces, part.buffer)
    return RankStates(
        parameters=part.weights * dtype_bytes,
        gradients=part.buffer * GRADIENT_BYTES,
        optimizer=whole,
        optimizer_between=0 if is_offloading else whole,
        optimizer_on_host=whole * is_offloading,
        checkpoint=owned * (dtype_bytes + stored) + part.frozen * dtype_bytes,
        checkpoint_pieces=pieces * stored,
        step_temporaries=part.shard * GRADIENT_BYTES,  # AdamW's square roots, all at once
        largest_parameter=part.largest * dtype_bytes,
        largest_gradient=part.largest_trained * dtype_bytes,
    )


def optimizer_bytes(num_elements: int, dtype_bytes: int) -> int:
    """Return the bytes of Adam's states: two float32 moments, and a float32 copy of other parameters."""
    master = MASTER_BYTES if dtype_bytes < MASTER_BYTES else 0
    return num_elements * (master + 2 * MOMENT_BYTES)
