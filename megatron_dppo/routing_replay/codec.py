"""Turns expert ids into sets."""

import torch
from torch import Tensor


def as_expert_sets(indices: Tensor, num_experts: int) -> Tensor:
    """Return expert ids [N, top_k] as membership, [N, num_experts] bool."""
    chosen = torch.zeros(indices.shape[0], num_experts, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(1, indices.long(), True)
