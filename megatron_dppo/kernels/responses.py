"""Joins the tokens of responses that context parallelism splits over ranks, for rules over responses."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.kernels.vocab_parallel import gather_statistics
from megatron_dppo.types import each_token

Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class PackedResponses:
    """Positions of a micro-batch's responses, and of this rank's rows in it."""

    lengths: Tensor  # [B] int64: packed tokens of each response, on all ranks of `group` together
    group: dist.ProcessGroup | None = None  # context-parallel ranks, each with the same number of tokens
    order: Tensor | None = None  # [whole] int64: position of each of the ranks' concatenated rows

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

    def whole(self, values: Tensor) -> Tensor:
        """Return the rows of all ranks in their order: [T, ...] -> [whole, ...], the same bits on each.

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
