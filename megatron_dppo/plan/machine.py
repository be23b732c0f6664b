"""Describes the GPUs of a plan, with published figures of their speed."""

from dataclasses import dataclass

from megatron_dppo.plan.units import GIB

RESERVE_BYTES = 2 * GIB
"""Bytes of CUDA context, NCCL buffers and library workspaces of one process; an assumption, not measured."""
ENGINE_RESIDUE_BYTES = 2 * GIB
"""Bytes that a colocated engine's process keeps while weights and cache are released; an assumption."""
FRAGMENTATION = 0.05
"""Share of activations and logits that the allocator cannot use; an assumption."""
PROCESS_HOST_BYTES = 4 * GIB
"""Host memory of one trainer process with its libraries; an assumption."""

# An H100 SXM node, from NVIDIA's data sheets; bytes and operations per second, one direction.
GPU_NAME = "H100"
BFLOAT16_FLOPS = 989e12
NVLINK_BYTES_PER_S = 450e9
NETWORK_BYTES_PER_S = 50e9  # one 400 Gbit/s adapter for each GPU
PCIE_BYTES_PER_S = 64e9
COMPUTE_EFFICIENCY = 0.5  # of large matrix products within a layer
LINK_EFFICIENCY = 0.7


@dataclass(frozen=True)
class Machine:
    """Number and memory of the GPUs and hosts."""

    num_gpus: int
    gpu_bytes: int  # of each GPU
    host_bytes: int | None = None  # of each node; None: not checked
    gpus_per_node: int = 8

    @property
    def ranks_per_node(self) -> int:
        """Number of trainer processes that share one host."""
        return min(self.num_gpus, self.gpus_per_node)

    def link(self, span: int) -> float:
        """Return bytes per second of each GPU in a group that spans `span` consecutive ranks."""
        published = NVLINK_BYTES_PER_S if span <= self.gpus_per_node else NETWORK_BYTES_PER_S
        return published * LINK_EFFICIENCY
