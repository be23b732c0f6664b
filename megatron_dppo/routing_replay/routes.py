"""Validates captured routes, and measures how far the trainer's own routing agrees with them."""

from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.types import ModelRouting, Sample

_WHAT_TO_DO = "Check that the engine serves the model being trained, or set rollout.routing_replay = 'off'."


def validate_routes(sample: Sample, routing: ModelRouting) -> None:
    """Check a sample's routes against the model they would be replayed on."""
    routes = sample.routed_experts
    if routes is None:
        raise RoutingReplayError(f"sample {sample.id}: no routed_experts came with the response. {_WHAT_TO_DO}")
    expected = (sample.tokens.numel() - 1, len(routing.layer_numbers), routing.top_k)
    if tuple(routes.indices.shape) != expected:
        raise RoutingReplayError(
            f"sample {sample.id}: routed_experts is {tuple(routes.indices.shape)}; expected {expected} "
            f"(rows, MoE layers, experts per token) for {sample.tokens.numel()} tokens. {_WHAT_TO_DO}"
        )
    if routes.layer_numbers != routing.layer_numbers:
        raise RoutingReplayError(
            f"sample {sample.id}: routes of layers {routes.layer_numbers}; "
            f"the model's MoE layers are {routing.layer_numbers}. {_WHAT_TO_DO}"
        )
    if routes.num_experts != routing.num_experts:
        raise RoutingReplayError(
            f"sample {sample.id}: routes over {routes.num_experts} experts; "
            f"the model has {routing.num_experts}. {_WHAT_TO_DO}"
        )
    indices = routes.indices.numpy()  # as narrow as they came: there are hundreds for each token
    if indices.size and not (indices.min() >= 0 and indices.max() < routing.num_experts):
        raise RoutingReplayError(
            f"sample {sample.id}: expert ids {indices.min()}..{indices.max()}; "
            f"expected 0..{routing.num_experts - 1}. {_WHAT_TO_DO}"
        )
    if not indices.any() and routing.num_experts > 1:
        raise RoutingReplayError(
            f"sample {sample.id}: all routes are expert 0: nothing was captured. {_WHAT_TO_DO}"
        )
    columns = np.ascontiguousarray(indices.reshape(-1, routing.top_k).T)
    if any(bool((one == other).any()) for one, other in combinations(columns, 2)):
        num_repeats = int((np.diff(np.sort(columns, axis=0), axis=0) == 0).any(axis=0).sum())
        raise RoutingReplayError(
            f"sample {sample.id}: {num_repeats} rows name an expert twice; expected distinct. {_WHAT_TO_DO}"
        )


def overlap(own: Tensor, rollout: Tensor, num_experts: int) -> Tensor:
    """Return the share of the rollout's experts that the live router would choose too.

    Args:
        own: [N, top_k] ids that the live router ranks highest.
        rollout: [N, top_k] ids that the rollout used.
        num_experts: Experts of the layer.

    Returns:
        [N] float32 in [0, 1]: |own ∩ rollout| / top_k (DESIGN: agreement per layer is its mean).
    """
    return num_shared(own, rollout, num_experts).float() / rollout.shape[1]


def index_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of the expert ids in `RoutedExperts.indices`."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def num_shared(own: Tensor, rollout: Tensor, num_experts: int) -> Tensor:
    """Return [N] int64, the number of the rollout's experts that the live router would choose too."""
    both = as_expert_sets(own, num_experts) & as_expert_sets(rollout, num_experts)
    return both.sum(dim=1)


def as_expert_sets(indices: Tensor, num_experts: int) -> Tensor:
    """Return expert ids [N, top_k] as membership, [N, num_experts] bool."""
    chosen = torch.zeros(indices.shape[0], num_experts, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, indices.long(), True)
