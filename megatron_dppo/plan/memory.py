"""Estimates the memory of a layout: every pipeline stage, the engine and the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.plan.engine import EngineMemory, engine_memory
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import PROCESS_HOST_BYTES
from megatron_dppo.plan.moments import MOMENTS, Components, stage_moments
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.states import RankStates, rank_states


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage, at each moment."""

    stage: int
    moments: Mapping[str, Components]  # bytes of each component at each moment

    def total(self, moment: str) -> int:
        """Return the bytes of all components."""
        return sum(self.moments[moment].values())

    @property
    def worst_moment(self) -> str:
        """Moment with the most bytes on this rank."""
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> int:
        """Most bytes at any moment."""
        return self.total(self.worst_moment)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that the ranks of one node use."""

    per_rank: Mapping[str, int]  # of the rank that takes most
    ranks_per_node: int

    @property
    def per_node(self) -> int:
        """Bytes of all ranks of a node, if each used the bytes of the largest."""
        return sum(self.per_rank.values()) * self.ranks_per_node


@dataclass(frozen=True)
class Memory:
    """Memory of a layout on its GPUs and hosts."""

    layout: Layout
    options: Options
    stages: tuple[StageMemory, ...]
    engine: EngineMemory
    host: HostMemory
    num_microbatches: int  # of one gradient step on one rank
    microbatch_tokens: int

    @property
    def worst(self) -> StageMemory:
        """Pipeline stage with the most bytes on a rank."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Most bytes on any GPU."""
        return self.worst.peak


def memory_of(job: Job, layout: Layout) -> Memory:
    """Return the memory of a layout that divides the model.

    Raises:
        ConfigError: An option of [sglang] has an invalid value.
    """
    parts = job.partition(layout)
    engine = engine_memory(job.config, job.shape, layout, job.machine)
    states = [rank_states(job, part) for part in parts]
    return Memory(
        layout=layout,
        options=job.options,
        stages=tuple(
            StageMemory(part.stage, stage_moments(job, layout, engine, part, own))
            for part, own in zip(parts, states, strict=True)
        ),
        engine=engine,
        host=_host_memory(job, layout, states),
        num_microbatches=job.workload.num_microbatches(layout.data),
        microbatch_tokens=job.workload.microbatch_tokens(layout.data),
    )


def _host_memory(job: Job, layout: Layout, stages: Sequence[RankStates]) -> HostMemory:
    """Return the host memory of a rank of the pipeline stage that needs most."""
    candidates = [_of_stage(job, layout, states) for states in stages]
    largest = max(candidates, key=lambda components: sum(components.values()))
    return HostMemory(largest, job.machine.ranks_per_node)


def _of_stage(job: Job, layout: Layout, states: RankStates) -> dict[str, int]:
    routing = job.shape.sizes.routing if job.config.rollout.routing_replay != "off" else None
    components = {
        "process": PROCESS_HOST_BYTES,
        "rollout data": rollout_bytes_bound(job.config, layout.world_size, layout.data, routing),
        "optimizer": states.optimizer_on_host,
        "trainer during rollout": (states.parameters + states.optimizer_between)
        * job.config.rollout.takes_turns,
        "reference": states.parameters * job.has_reference_weights,
        "checkpoint in flight": states.checkpoint
        if job.config.checkpoint.asynchronous
        else states.checkpoint_pieces,
    }
    return {name: num_bytes for name, num_bytes in components.items() if num_bytes}
