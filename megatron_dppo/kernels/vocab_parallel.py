"""Log-probs of a vocabulary that is split over tensor-parallel ranks, exact, from one exchange."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary a rank's logits are."""

    start: int  # global id of the first column; ranks have equally many columns, in rank order
    vocab_size: int  # of the model, without the columns that pad the last shards
    group: dist.ProcessGroup  # the ranks that hold the other columns

    def num_columns(self, width: int) -> int:
        """How many of a shard's `width` columns are tokens; the rest is padding."""
        return max(0, min(width, self.vocab_size - self.start))


class _GatherShards(torch.autograd.Function):
    """[...] of each rank -> [ranks, ...]. The loss is the same on every rank, so backward is the own slice."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank = group.rank()
        gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered.view(group.size(), *own.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.rank], None


def sharded_log_probs(logits: Tensor, ids: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Log-probs of chosen tokens and the entropy, the same on every rank of the shard's group.

    Each rank sends, per position, the largest of its logits, its sum of exponentials, its part of the mean
    logit, and its logits of the chosen tokens: [T, 3 + K] numbers in one all-gather.

    Args:
        logits: [T, V/ranks] float32 or float64, this rank's columns; padding columns never count.
        ids: [T, K] int64 global ids, none negative.
        shard: Where the columns stand.

    Returns:
        [T, K] log-probs, and [T] entropy in nats; gradients flow into this rank's columns.
    """
    own = logits[:, : shard.num_columns(logits.shape[1])]
    local = ids - shard.start
    is_here = (local >= 0) & (local < own.shape[1])
    chosen = own.gather(1, local.clamp(0, max(own.shape[1] - 1, 0)))
    highest = own.detach().amax(1, keepdim=True)
    shifted = own - highest
    exponentials = shifted.exp()
    statistics = torch.cat(
        [
            highest,
            exponentials.sum(1, keepdim=True),
            (exponentials * shifted).sum(1, keepdim=True),
            torch.where(is_here, chosen - highest, 0.0),
        ],
        dim=1,
    )
    shards = _GatherShards.apply(statistics, shard.group)
    top = shards[:, :, :1].detach()
    below = top - top.amax(0)  # how far a rank's largest logit is below the largest of all, <= 0
    scale = below.exp()
    total = (scale * shards[:, :, 1:2]).sum(0)  # [T, 1]
    weighted = (scale * (shards[:, :, 2:3] + below * shards[:, :, 1:2])).sum(0)
    owner = ids // logits.shape[1]  # every rank has as many columns
    chosen_below = (shards[:, :, 3:] + below).gather(0, owner[None])[0]
    log_total = total.log()
    return chosen_below - log_total, (log_total - weighted / total)[:, 0]
