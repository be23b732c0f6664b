"""The split of a fused loss over ranks.

Tensor parallelism splits the vocabulary, so that ranks exchange statistics. Context parallelism splits the
tokens of responses, so that rules over complete responses join them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import each_token

LOGIT_TYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that a rank's logits hold."""

    start: int  # global id of the first column; shards follow each other in rank order
    vocab_size: int  # of the model, without the columns that pad the last shards
    group: dist.ProcessGroup | None = None  # the ranks that hold the other columns; None without a split

    @classmethod
    def of(
        cls, width: int, start: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> "VocabShard":
        """Return the shard of `width` columns; a vocabulary of size `None` has no padding."""
        shard = cls(start, 0, group)
        return replace(shard, vocab_size=width * shard.num_ranks if vocab_size is None else vocab_size)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()


def gather_statistics(
    own: Shaped[Tensor, "T ..."], group: dist.ProcessGroup | None
) -> Shaped[Tensor, "ranks T ..."]:
    """Return the rows of all ranks, in rank order: the same bits on every rank."""
    if group is None or group.size() == 1:
        return own[None]
    gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(group.size(), *own.shape)


def require_shard(logits: Float[Tensor, "T V"], shard: VocabShard) -> None:
    """Refuse logits that are not this rank's shard of the vocabulary."""
    size, rank = shard.num_ranks, 0 if shard.group is None else shard.group.rank()
    if logits.dim() != 2 or logits.dtype not in LOGIT_TYPES:
        found = f"shape {list(logits.shape)}, {logits.dtype}"
        expected = "[T, V/tp] in bfloat16, float32 or float64"
        raise ConfigError(
            Problem("fused_policy_loss.logits", found, expected, "Flatten batch and sequence into T.")
        )
    start, whole, end = shard.start, shard.vocab_size, shard.start + logits.shape[1]
    if start < 0 or (rank == 0 and start != 0) or (rank == size - 1 and end < whole):
        raise ConfigError(
            Problem(
                "fused_policy_loss.vocab_start",
                f"columns {start} to {end} on rank {rank} of {size}",
                f"shards in rank order that cover the {whole} tokens of the vocabulary",
                "Pass the global id of the shard's first column, vocab_size without padding, and the group "
                "whose ranks hold the other columns.",
            )
        )


def require_cover(shard: VocabShard, width: int, device: torch.device) -> None:
    """Refuse shards that leave tokens out or hold some twice; one exchange, and a device synchronisation."""
    if shard.group is None:
        return
    own = torch.tensor([[shard.start, shard.start + width]], device=device)
    end = 0
    for rank, (start, stop) in enumerate(gather_statistics(own, shard.group).view(-1, 2).tolist()):
        if start != end:
            found = f"columns {start} to {stop} on rank {rank} of the group, after column {end}"
            expected = f"shards that cover the {shard.vocab_size} tokens without gaps or overlaps"
            action = "Pass the global id of each shard's first column."
            raise ConfigError(Problem("fused_policy_loss.vocab_start", found, expected, action))
        end = stop


Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class PackedResponses:
    """Positions of a micro-batch's responses, and of this rank's rows in it."""

    lengths: Int64[Tensor, " B"]  # packed tokens of each response, on all ranks of `group` together
    group: dist.ProcessGroup | None = None  # context-parallel ranks, each with the same number of tokens
    order: Int64[Tensor, " whole"] | None = None  # position of each of the ranks' concatenated rows

    @property
    def is_split(self) -> bool:
        """Whether other ranks have some of the tokens."""
        return self.group is not None and self.group.size() > 1

    @cached_property
    def _sources(self) -> Tensor:
        assert self.order is not None, "split responses have the position of each row"
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.numel(), device=self.order.device)
        )

    def whole(self, values: Shaped[Tensor, "T ..."]) -> Shaped[Tensor, "whole ..."]:
        """Return the rows of all ranks in their order, the same bits on each.

        All ranks of the group call it together.
        """
        if not self.is_split:
            return values
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        gathered = gather_statistics(sent.contiguous(), self.group).flatten(0, 1)
        return gathered[self._sources].to(values.dtype)

    def whole_record(self, record: Record) -> Record:
        """Return a record of per-token tensors with the rows of all ranks."""
        return each_token(record, lambda values, _: self.whole(values)) if self.is_split else record

    def own(self, values: Any, dim: int = 0) -> Any:
        """Return this rank's rows, in its order, of a tensor that has the rows of all ranks along `dim`."""
        if not self.is_split or values is None:
            return values
        assert self.group is not None and self.order is not None
        num_rows = self.order.numel() // self.group.size()
        first = self.group.rank() * num_rows
        return values.index_select(dim, self.order[first : first + num_rows])
