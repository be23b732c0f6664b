"""Rows that grow at their end: those of a conversation, turn after turn, without a copy of all earlier ones."""

import threading
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_SPARE = 1.5  # rows of memory for each row in use, from the second time that rows grow


class TokenIds(Sequence[int]):
    """Token ids of a prompt, and of rows `[N]` int64 behind it. They become a list only where one is read."""

    def __init__(self, prompt: tuple[int, ...], rows: Tensor | None = None) -> None:
        self._prompt, self._rows = prompt, rows

    def __len__(self) -> int:
        return len(self._prompt) + (0 if self._rows is None else self._rows.numel())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def tolist(self) -> list[int]:
        """Return all of them."""
        if self._rows is None:
            return [*self._prompt]
        return [*self._prompt, *self._rows.tolist()]  # pyright: ignore[reportUnknownMemberType]


@dataclass(eq=False)
class _Memory:
    """Memory of rows `[N, ...]`, of which the first ones are in use."""

    rows: Tensor
    num_used: int


_MEMORIES: MutableMapping[Tensor, _Memory] = WeakTensorKeyDictionary()
_LOCK = threading.Lock()


def joined(head: Tensor, tail: Tensor) -> Tensor:
    """Return the rows `[N, ...]` of `head` and those of `tail` behind them, as `torch.cat` does.

    The result shares the memory of `head` if that was returned by this function, nothing was appended to it yet
    and its memory has room. Otherwise the rows are copied, so no result ever changes. A conversation of any
    number of turns copies fewer than 4 times its rows, and the memory of its last turn has 1.5 times as many.
    """
    if (head.dtype, head.device, head.shape[1:]) != (tail.dtype, tail.device, tail.shape[1:]):
        return torch.cat([head, tail])
    num_rows, num_old = head.shape[0] + tail.shape[0], head.shape[0]
    with _LOCK:
        memory = _MEMORIES.get(head)
        has_room = memory is not None and memory.num_used == num_old and num_rows <= memory.rows.shape[0]
        if memory is None or not has_room:
            most = num_rows if memory is None else int(_SPARE * num_rows)
            memory = _Memory(head.new_empty((most, *head.shape[1:])), num_rows)
            memory.rows[:num_old] = head
        memory.rows[num_old:num_rows] = tail
        memory.num_used = num_rows
        rows = memory.rows[:num_rows]
        _MEMORIES[rows] = memory
    return rows


def cut(rows: Tensor, num_rows: int) -> Tensor:
    """Return the first rows. The others, and `rows`, must not be used any more: `joined` may overwrite them."""
    first = rows[:num_rows]
    with _LOCK:
        memory = _MEMORIES.get(rows)
        if memory is not None and memory.num_used == rows.shape[0]:
            memory.num_used = num_rows
            _MEMORIES[first] = memory
    return first
