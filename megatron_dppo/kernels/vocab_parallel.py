"""Splits the vocabulary over tensor-parallel ranks: each rank's columns, and the one exchange."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.errors import ConfigError, Problem


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that a rank's logits hold."""

    start: int  # global id of the first column; shards follow each other in rank order
    vocab_size: int  # of the model, without the columns that pad the last shards
    group: dist.ProcessGroup | None = None  # the ranks that hold the other columns; None without a split

    def num_columns(self, width: int) -> int:
        """Return how many of a shard's `width` columns are tokens; the rest is padding."""
        return num_columns(width, self.start, self.vocab_size)


def num_columns(width: int, vocab_start: int, vocab_size: int) -> int:
    """Return how many of `width` columns from `vocab_start` on are tokens of the vocabulary."""
    return max(0, min(width, vocab_size - vocab_start))


def require_cover(shard: VocabShard, width: int, device: torch.device) -> None:
    """Refuse shards that leave tokens out or hold some twice; one exchange, and a device synchronisation.

    Raises:
        ConfigError: On every rank of the group, naming the first shard that does not follow the one before.
    """
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


def gather_statistics(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T, ...] of this rank -> [ranks, T, ...], in rank order: the same bits on every rank."""
    if group is None or group.size() == 1:
        return own[None]
    gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(group.size(), *own.shape)
