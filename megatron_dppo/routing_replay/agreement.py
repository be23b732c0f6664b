"""Measures how far the trainer's own routing agrees with the rollout's."""

from torch import Tensor

from megatron_dppo.routing_replay.codec import as_expert_sets


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


def num_shared(own: Tensor, rollout: Tensor, num_experts: int) -> Tensor:
    """Return [N] int64, the number of the rollout's experts that the live router would choose too."""
    both = as_expert_sets(own, num_experts) & as_expert_sets(rollout, num_experts)
    return both.sum(dim=1)
