"""Options of how a checkpoint is written."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Options:
    """How to write.

    Attributes:
        dtype: Of all tensors, a rounding; none keeps the source's.
        file_bytes: A new file is begun when the current one would exceed this.
        num_writers: Files that a process writes at a time.
        on_bytes: Called, in any thread, with the bytes of each tensor that is done.
    """

    dtype: torch.dtype | None = None
    file_bytes: int = 4 << 30
    num_writers: int = 1
    on_bytes: Callable[[int], None] = lambda _: None
