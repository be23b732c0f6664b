"""R3: train on the rollout's expert choices (arXiv 2510.11370).

Megatron-Core lets each router consult an object before it picks experts. We give each router of *this* model
its own, so that no other model in the process is touched. Only indices are replayed: the chosen experts'
probabilities come from the live logits, and the router keeps its gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.routing_replay.agreement import overlap
from megatron_dppo.types import RoutedExperts

TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class _RouterTap:
    """What one router consults: takes the rollout's experts, and counts how often its own agree."""

    num_experts: int
    is_replaying: bool
    is_measuring: bool
    rollout: Tensor | None = None  # [T, top_k] int64
    counted: Tensor | None = None  # [T] bool: positions that enter the agreement
    sum_overlap: float = 0.0
    num_counted: int = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron's hook: ([T, top_k] scores, [T, top_k] expert ids) for scores [T, experts]."""
        assert default_compute_topk is not None and self.rollout is not None, "follow() comes before forward"
        if self.rollout.shape[0] != scores.shape[0]:
            raise RoutingReplayError(
                f"routes for {self.rollout.shape[0]} tokens, the router sees {scores.shape[0]}. "
                "The micro-batch was split by a layout that replay does not support."
            )
        if self.is_measuring:
            with torch.no_grad():
                self._measure(default_compute_topk(scores, topk, num_groups, group_topk)[1])
        if self.is_replaying:
            return scores.gather(1, self.rollout), self.rollout
        return default_compute_topk(scores, topk, num_groups, group_topk)

    def _measure(self, own: Tensor) -> None:
        assert self.rollout is not None and self.counted is not None
        agreement = overlap(own, self.rollout, self.num_experts)[self.counted]
        self.sum_overlap += float(agreement.sum())
        self.num_counted += agreement.numel()


@dataclass
class Replay:
    """The routers of one model while they follow the rollout."""

    taps: dict[int, _RouterTap] = field(default_factory=dict)

    def follow(self, routes: RoutedExperts, counted: Tensor) -> None:
        """Use these routes until the next call, also when activations are recomputed.

        Args:
            routes: Indices [T, layers, top_k] for the tokens of the next forward.
            counted: [T] bool, the positions whose agreement is measured.

        Raises:
            RoutingReplayError: The routes are of other layers than the model's.
        """
        if set(self.taps) - set(routes.layer_numbers):
            raise RoutingReplayError(
                f"routes of layers {routes.layer_numbers}; the model has experts in {sorted(self.taps)}. "
                "The rollout engine serves another model."
            )
        for column, layer in enumerate(routes.layer_numbers):
            if layer in self.taps:
                tap = self.taps[layer]
                tap.rollout = routes.indices[:, column].long().to(counted.device)
                tap.counted = counted

    def agreement(self) -> dict[int, tuple[float, int]]:
        """Per MoE layer: the sum of overlaps, and over how many positions."""
        return {layer: (tap.sum_overlap, tap.num_counted) for layer, tap in self.taps.items()}


def routers(model: torch.nn.Module) -> dict[int, TopKRouter]:
    """The model's routers by 0-based layer index, in order."""
    found = (module for module in model.modules() if isinstance(module, TopKRouter))
    return {router.layer_number - 1: router for router in found if router.layer_number is not None}


@contextmanager
def replaying(
    model: torch.nn.Module, is_replaying: bool = True, is_measuring: bool = False
) -> Iterator[Replay]:
    """Let the model's routers follow the rollout inside the block; restores what they consulted before.

    Give each micro-batch's routes with `Replay.follow` before its forward pass. The block must hold the
    backward pass too when activations are recomputed.

    Args:
        model: A Megatron model, wrapped or not.
        is_replaying: Use the rollout's experts; otherwise the routers choose for themselves.
        is_measuring: Count how often the routers' own choice agrees.
    """
    own_routers: dict[int, Any] = dict(routers(model))
    before = {layer: router.router_replay for layer, router in own_routers.items()}
    replay = Replay()
    try:
        for layer, router in own_routers.items():
            replay.taps[layer] = _RouterTap(int(router.num_experts), is_replaying, is_measuring)
            router.router_replay = replay.taps[layer]
        yield replay
    finally:
        for layer, router in own_routers.items():
            router.router_replay = before[layer]
