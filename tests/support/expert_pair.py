"""Our grouped experts and Megatron's sequential ones, for one process to compare."""

from pathlib import Path
from typing import Any

import torch


def expert_pair(folder: Path, num_experts: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """GroupedExperts and SequentialMLP with the same random weights, of the sizes of a model's experts.

    Args:
        folder: The model's Hugging Face folder.
        num_experts: How many of them.
        dtype: Dtype of weights and activations.
        device: Where to compute.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import transformer_config
    from megatron_dppo.models.experts import GroupedExperts

    cpu.install()
    fixes.apply()
    layout = Layout(world_size=1)
    initialize_groups(layout, seed=0)
    config = transformer_config(read_hf_config(folder), dtype, megatron_sizes(layout), {})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    sequential = SequentialMLP(num_experts, config, linears, pg_collection=groups).to(device)
    grouped = GroupedExperts(num_experts, config, pg_collection=groups).to(device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight, linear in ((grouped.fc1_weight, "linear_fc1"), (grouped.fc2_weight, "linear_fc2")):
            weight.copy_(torch.randn(weight.shape, generator=generator))
            for expert, part in zip(sequential.local_experts, weight, strict=True):
                getattr(expert, linear).weight.copy_(part)
    return grouped, sequential
