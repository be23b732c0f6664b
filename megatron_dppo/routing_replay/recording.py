"""R2: keep the experts that the trainer's own routers choose, so that later gradient steps replay them.

Routing replay of arXiv 2507.18071, which verl names R2. `replay.py` is R3: the rollout engine's choices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from megatron_dppo.routing_replay.replay import TopK, hooked
from megatron_dppo.types import ModelRouting


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
        """Return the experts of a micro-batch's tokens, 0 where the routers of other ranks chose.

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
