"""Estimates the trainer's host memory, per rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.plan.engine import EngineMemory
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import PROCESS_HOST_BYTES
from megatron_dppo.plan.states import RankStates
from megatron_dppo.types import ModelRouting


@dataclass(frozen=True)
class HostMemory:
    """Bytes that the ranks of one node take of its memory."""

    per_rank: Mapping[str, int]  # of the rank that takes most
    ranks_per_node: int

    @property
    def per_node(self) -> int:
        """Bytes of all ranks of a node, were each like the largest."""
        return sum(self.per_rank.values()) * self.ranks_per_node


def host_memory(job: Job, layout: Layout, stages: Sequence[RankStates], engine: EngineMemory) -> HostMemory:
    """Return the host memory of a rank of the pipeline stage that needs most."""
    candidates = [_of_stage(job, layout, states, engine) for states in stages]
    largest = max(candidates, key=lambda components: sum(components.values()))
    return HostMemory(largest, job.machine.ranks_per_node)


def _of_stage(job: Job, layout: Layout, states: RankStates, engine: EngineMemory) -> dict[str, int]:
    sizes = job.shape.sizes
    routing = None
    if job.config.rollout.routing_replay != "off" and sizes.num_experts is not None:
        routing = ModelRouting(sizes.moe_layers, sizes.num_experts, sizes.experts_per_token)
    leaves_gpu = job.config.rollout.release_trainer or not (engine.is_resident or engine.is_separate)
    components = {
        "process": PROCESS_HOST_BYTES,
        "rollout data": rollout_bytes_bound(job.config, layout.world_size, layout.data, routing),
        "optimizer": states.optimizer_on_host,
        "trainer during rollout": (states.parameters + states.optimizer_between) * leaves_gpu,
        "checkpoint in flight": (states.parameters + states.optimizer) * job.config.checkpoint.asynchronous,
    }
    return {name: num_bytes for name, num_bytes in components.items() if num_bytes}
