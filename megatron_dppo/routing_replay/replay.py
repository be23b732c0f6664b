"""Replays expert choices while training: the rollout's (R3), or those that the trainer recorded (R2).

R3 is arXiv 2510.11370. R2 is what verl calls the routing replay of arXiv 2507.18071: it keeps the experts that
the trainer's own routers choose, and later gradient steps replay them.

Megatron-Core lets each router consult an object before it picks experts. We give each router of *this* model
its own, so that no other model in the process is touched. Only indices are replayed: the chosen experts'
probabilities come from the live logits, and the router keeps its gradient.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int64, Integer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.routing_replay.routes import num_shared
from megatron_dppo.types import ModelRouting, RoutedExperts

TopK = Callable[..., tuple[Tensor, Tensor]]
Tap = TypeVar("Tap")


@dataclass
class _RouterTap:
    """The hook of one router: returns the rollout's experts, and counts how often the router's own agree."""

    num_experts: int
    top_k: int
    is_replaying: bool
    is_measuring: bool
    rollout: Float[Tensor, "T top_k"] | None = None  # of the next forward pass
    counted: Int64[Tensor, " T"] | None = None  # times that each position enters the agreement
    forwarded: deque[Tensor] = field(default_factory=deque[Tensor])  # `rollout` of passes not yet recomputed
    totals: Int64[Tensor, " 2"] | None = None  # so far: experts in common, and positions

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and expert ids, [T, top_k] each, for scores [T, experts]: Megatron's hook."""
        assert default_compute_topk is not None and self.rollout is not None, "follow() comes before forward"
        is_recomputing = is_in_backward()
        if is_recomputing:
            # Pipelines forward further micro-batches before the backward pass of this one, in the same order.
            rollout = self.forwarded.popleft()
        else:
            rollout = self.rollout
            self.forwarded.append(rollout)
        if rollout.shape[0] != scores.shape[0]:
            raise RoutingReplayError(
                f"routes for {rollout.shape[0]} tokens, the router sees {scores.shape[0]}. "
                "The micro-batch was split by a layout that replay does not support."
            )
        rollout = rollout.long()
        if self.is_measuring and not is_recomputing:
            with torch.no_grad():
                self._measure(default_compute_topk(scores, topk, num_groups, group_topk)[1], rollout)
        if self.is_replaying:
            return scores.gather(1, rollout), rollout
        return default_compute_topk(scores, topk, num_groups, group_topk)

    def _measure(self, own: Tensor, rollout: Tensor) -> None:
        """Add to the totals, on the device: reading them here would make the host wait in each layer."""
        assert self.counted is not None
        shared = num_shared(own, rollout, self.num_experts) * self.counted
        added = torch.stack([shared.sum(), self.counted.sum()])
        self.totals = added if self.totals is None else self.totals + added


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass: a router called there recomputes activations."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Replay:
    """The routers of one model while they follow the rollout."""

    chunks: list[dict[int, _RouterTap]] = field(default_factory=list[dict[int, _RouterTap]])

    def follow(self, routes: RoutedExperts, counted: Tensor, chunk: int = 0) -> None:
        """Set the routes of a chunk's next forward pass, also for recomputed activations.

        Args:
            routes: Indices [T, layers, top_k] for the tokens of the pass that this rank's routers see.
            counted: [T] int64, times that the agreement of each position counts.
            chunk: Which of the model's chunks comes next.
        """
        taps = self.chunks[chunk]
        if set(taps) - set(routes.layer_numbers):
            raise RoutingReplayError(
                f"routes of layers {routes.layer_numbers}; the model has experts in {sorted(taps)}. "
                "The rollout engine serves another model."
            )
        for column, layer in enumerate(routes.layer_numbers):
            if layer in taps:
                taps[layer].rollout = routes.indices[:, column].to(counted.device)
                taps[layer].counted = counted

    def agreement(self) -> dict[int, tuple[float, int]]:
        """Return the sum of overlaps and the number of positions, for each MoE layer of this rank."""
        taps = {layer: tap for chunk in self.chunks for layer, tap in chunk.items()}
        totals = {layer: tap.totals for layer, tap in taps.items() if tap.totals is not None}
        found: dict[int, tuple[float, int]] = dict.fromkeys(taps, (0.0, 0))
        if totals:
            read = torch.stack(list(totals.values())).tolist()  # the one wait for all layers
            for layer, (shared, num) in zip(totals, read, strict=True):
                found[layer] = (shared / taps[layer].top_k, num)
        return found


def routers(model: torch.nn.Module) -> dict[int, TopKRouter]:
    """Return the model's routers by 0-based layer index, in order."""
    found = (module for module in model.modules() if isinstance(module, TopKRouter))
    return {router.layer_number - 1: router for router in found if router.layer_number is not None}


@contextmanager
def replaying(chunks: Sequence[torch.nn.Module], *, is_replaying: bool, is_measuring: bool) -> Iterator[Replay]:
    """Replay the rollout's routes in the model's routers inside the block; restores their hooks after it.

    Give each micro-batch's routes with `Replay.follow` before its forward pass. The block must hold the
    backward pass too when activations are recomputed.

    Args:
        chunks: This rank's part of a Megatron model, wrapped or not: one per virtual pipeline stage.
        is_replaying: Use the rollout's experts; otherwise the routers choose for themselves.
        is_measuring: Count how often the routers' own choice agrees.
    """

    def tap(router: Any) -> _RouterTap:
        return _RouterTap(int(router.num_experts), int(router.topk), is_replaying, is_measuring)

    with hooked(chunks, tap) as taps:
        yield Replay(taps)


@contextmanager
def hooked(chunks: Sequence[torch.nn.Module], tap_of: Callable[[Any], Tap]) -> Iterator[list[dict[int, Tap]]]:
    """Let each router of the chunks consult its own tap inside the block; restores their hooks after it.

    Yields:
        The taps of each chunk, by 0-based layer index.
    """
    own: list[dict[int, Any]] = [dict(routers(chunk)) for chunk in chunks]
    before = [{layer: router.router_replay for layer, router in chunk.items()} for chunk in own]
    taps: list[dict[int, Tap]] = []
    try:
        for chunk in own:
            taps.append({layer: tap_of(router) for layer, router in chunk.items()})
            for layer, router in chunk.items():
                router.router_replay = taps[-1][layer]
        yield taps
    finally:
        for chunk, restored in zip(own, before, strict=True):
            for layer, router in chunk.items():
                router.router_replay = restored[layer]


@dataclass
class _Recorder:
    """The hook of one router: keeps what it chooses in each forward pass, in order."""

    dtype: torch.dtype
    chosen: list[Integer[Tensor, "T top_k"]] = field(default_factory=list[Tensor])

    def get_replay_topk(
        self,
        scores: Float[Tensor, "T experts"],
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and expert ids, [T, top_k] each, as the router alone would: Megatron's hook."""
        assert default_compute_topk is not None, "Megatron passes its own choice"
        probs, experts = default_compute_topk(scores, topk, num_groups, group_topk)
        self.chosen.append(experts.detach().to(self.dtype))
        return probs, experts


@dataclass
class Recording:
    """The routes of the forward passes inside the block of `recording`, on this rank."""

    routing: ModelRouting
    chunks: Sequence[dict[int, _Recorder]]

    def rows(self, index: int, num_rows: int, own: slice) -> Integer[Tensor, "rows moe_layers top_k"]:
        """Return the experts of a micro-batch's tokens, 0 if the routers of other ranks chose.

        Args:
            index: Which micro-batch, in the order in which they were forwarded.
            num_rows: Tokens of this context-parallel rank.
            own: Those of them that this rank's routers saw.
        """
        recorders = {layer: each for chunk in self.chunks for layer, each in chunk.items()}
        shape = (num_rows, len(self.routing.layer_numbers), self.routing.top_k)
        found = torch.zeros(shape, dtype=dtype_of_sums(self.routing))
        for column, layer in enumerate(self.routing.layer_numbers):
            if layer in recorders:
                found[own, column] = recorders[layer].chosen[index].cpu()
        return found


def dtype_of_sums(routing: ModelRouting) -> torch.dtype:
    """Return the narrowest dtype of expert ids that NCCL and gloo can sum."""
    return torch.uint8 if routing.num_experts <= 256 else torch.int32


@contextmanager
def recording(chunks: Sequence[torch.nn.Module], routing: ModelRouting) -> Iterator[Recording]:
    """Record what the model's routers choose inside the block, without gradient; restores their hooks after it.

    Args:
        chunks: This rank's part of a Megatron model, wrapped or not: one per virtual pipeline stage.
        routing: Dimensions of the whole model's routes.
    """
    with hooked(chunks, lambda _: _Recorder(dtype_of_sums(routing))) as recorders:
        yield Recording(routing, recorders)
