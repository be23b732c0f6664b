"""Experts of the torch layer spec: stacked weights, computed by grouped matrix products."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_dppo.kernels.ops import grouped_product
from megatron_dppo.mcore.groups import with_summed_gradient

_SIGMOID_FACTOR = 1.702


class GroupedExperts(torch.nn.Module):
    """This rank's experts as two stacked weights, computed by one grouped matrix product each.

    Checkpoint keys and global shapes are the same as in Megatron's SequentialMLP and TEGroupedMLP.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        assert pg_collection is not None and config.moe_ffn_hidden_size is not None
        width, hidden, dtype = config.moe_ffn_hidden_size, config.hidden_size, config.params_dtype
        width //= pg_collection.expt_tp.size()
        self.fc1_weight = torch.nn.Parameter(torch.zeros(num_local_experts, 2 * width, hidden, dtype=dtype))
        self.fc2_weight = torch.nn.Parameter(torch.zeros(num_local_experts, hidden, width, dtype=dtype))
        for weight in (self.fc1_weight, self.fc2_weight):
            is_replicated = config.expert_model_parallel_size == 1
            setattr(weight, "allreduce", is_replicated)  # noqa: B010 - Megatron reads it
        self.groups = pg_collection
        self.updates: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}  # LoRA's, to add to a weight's product

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run each expert on its tokens.

        Args:
            hidden: [N, H], sorted by local expert.
            tokens_per_expert: [num_local_experts] int64.
            probs: [N] routing weight of each row.

        Returns:
            [N, H], and no bias.
        """
        # The dispatcher copied the counts to page-locked memory: copying them back needs no wait.
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        return self._run(hidden, ends, probs), None

    def _run(self, hidden: Tensor, ends: Tensor, probs: Tensor) -> Tensor:
        """Return [N, H], of rows that end at `ends` [num_local_experts] int32."""
        gate, up = self._product("fc1_weight", hidden, ends).chunk(2, dim=-1)
        activated = (F.silu(gate) * up * probs.unsqueeze(-1)).to(hidden.dtype)
        return self._product("fc2_weight", activated, ends)

    def _product(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply `rows` [N, in], sorted by expert and ending at `ends`, to [N, out]."""
        output = grouped_product(rows, getattr(self, name), ends)
        update = self.updates.get(name)
        return output if update is None else output + update(rows, ends)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients come with the backward pass."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the experts as shards of [layers, experts, rows, columns] of all experts."""
        before, group = len(sharded_offsets), self.groups.expt_tp
        split = (before + 2, group.rank(), group.size())
        replica = (0, 0, self.groups.expt_dp.rank())
        return {
            f"{prefix}fc1_weight": self._gate_and_up(
                f"{prefix}experts.linear_fc1.weight", self.fc1_weight, sharded_offsets
            ),
            f"{prefix}fc2_weight": self._sharded(
                f"{prefix}experts.linear_fc2.weight", self.fc2_weight, sharded_offsets, replica, split
            ),
        }

    def _sharded(
        self,
        key: str,
        tensor: Tensor,
        offsets: tuple[Any, ...],
        replica: ReplicaId,
        *split: tuple[int, int, int],
    ) -> ShardedTensor:
        """Return a stack as a shard of all experts'."""
        before = len(offsets)
        expert_axis = (before, self.groups.ep.rank(), self.groups.ep.size())
        return ShardedTensor.from_rank_offsets(
            key,
            tensor,
            *offsets,
            expert_axis,
            *split,
            replica_id=replica,
            prepend_axis_num=before,
        )

    def _gate_and_up(self, key: str, tensor: Tensor, offsets: tuple[Any, ...]) -> ShardedTensorFactory:
        """Return a stack of gate and up, [experts, rows, ...].

        If experts are split, a rank has some rows of the gate and some rows of the up projection. These are not
        adjacent in the complete weight.
        """
        rank, size, rows = self.groups.expt_tp.rank(), self.groups.expt_tp.size(), len(offsets) + 1

        def build(
            key: str, whole: Tensor, replica: ReplicaId, flattened_range: slice | None
        ) -> ShardedStateDict:
            assert flattened_range is None, "optimizer states are stored in the parameters' shapes"
            # The distributed optimizer gives its states another replica than the parameter's.
            gate, up = whole.chunk(2, dim=1)
            return {
                "gate": self._sharded(key, gate, offsets, replica, (rows, rank, 2 * size)),
                "up": self._sharded(key, up, offsets, replica, (rows, size + rank, 2 * size)),
            }

        return ShardedTensorFactory(
            key,
            tensor,
            build,
            lambda parts: torch.cat([parts["gate"], parts["up"]], dim=1),
            (0, 0, self.groups.expt_dp.rank()),
        )


class BiasedExperts(GroupedExperts):
    """Experts with biases and a clamped activation: (up + 1) * gate * sigmoid(1.702 * gate).

    A rank with parts of experts adds its part of the second bias, so that the ranks' sums have it once.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *given: Any, **options: Any) -> None:
        super().__init__(num_local_experts, config, *given, **options)
        assert config.activation_func_clamp_value is not None, "the family sets it"
        self.limit = config.activation_func_clamp_value
        self.fc1_bias = torch.nn.Parameter(torch.zeros_like(self.fc1_weight[:, :, 0]))
        self.fc2_bias = torch.nn.Parameter(torch.zeros_like(self.fc2_weight[:, :, 0]))
        is_replicated = config.expert_model_parallel_size == 1
        marks = {"tensor_model_parallel": True, "shared": self.groups.expt_tp.rank() > 0}
        for bias, own in ((self.fc1_bias, {}), (self.fc2_bias, marks)):
            for mark, value in {"allreduce": is_replicated, **own}.items():
                setattr(bias, mark, value)  # Megatron sums gradients and norms by these

    def _run(self, hidden: Tensor, ends: Tensor, probs: Tensor) -> Tensor:
        rows, starts = torch.arange(len(hidden), device=hidden.device)[:, None], F.pad(ends, (1, -1))
        is_of = ((rows >= starts) & (rows < ends)).to(hidden.dtype)  # [N, num_local_experts]
        gate, up = (self._product("fc1_weight", hidden, ends) + is_of @ self.fc1_bias).chunk(2, dim=-1)
        gate, up, weights = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit), probs.unsqueeze(-1)
        activated = ((up + 1) * (gate * torch.sigmoid(_SIGMOID_FACTOR * gate)) * weights).to(hidden.dtype)
        group, bias = self.groups.expt_tp, self.fc2_bias
        if group.size() > 1:
            bias = with_summed_gradient(bias / group.size(), group)
        return self._product("fc2_weight", activated, ends) + (is_of * weights).to(hidden.dtype) @ bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return weights and biases as shards of all experts' weights and biases."""
        replica = (0, self.groups.expt_tp.rank(), self.groups.expt_dp.rank())  # all have the second bias
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | {
            f"{prefix}fc1_bias": self._gate_and_up(
                f"{prefix}experts.linear_fc1.bias", self.fc1_bias, sharded_offsets
            ),
            f"{prefix}fc2_bias": self._sharded(
                f"{prefix}experts.linear_fc2.bias", self.fc2_bias, sharded_offsets, replica
            ),
        }


class BiasedMoELayer(MoELayer):
    """Megatron's MoE layer with a bias of the router, which Megatron adds only with biases everywhere."""

    def __init__(self, config: TransformerConfig, *given: Any, **options: Any) -> None:
        super().__init__(config, *given, **options)
        router: Any = self.router
        router.bias = torch.nn.Parameter(torch.zeros_like(router.weight[:, 0]))
        setattr(router.bias, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron reads it
