"""A vocabulary that is split over tensor-parallel ranks: who has which columns, and the one exchange."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary a rank's logits are."""

    start: int  # global id of the first column; shards follow each other in rank order
    vocab_size: int  # of the model, without the columns that pad the last shards
    group: dist.ProcessGroup | None = None  # the ranks that hold the other columns; none where there are none

    def num_columns(self, width: int) -> int:
        """How many of a shard's `width` columns are tokens; the rest is padding."""
        return num_columns(width, self.start, self.vocab_size)


def num_columns(width: int, vocab_start: int, vocab_size: int) -> int:
    """How many of `width` columns from `vocab_start` on are tokens of the vocabulary."""
    return max(0, min(width, vocab_size - vocab_start))


def gather_statistics(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T, ...] of this rank -> [ranks, T, ...], in rank order: the same bits on every rank."""
    if group is None or group.size() == 1:
        return own[None]
    gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(group.size(), *own.shape)
