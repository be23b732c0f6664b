"""Options of writing a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.checkpoints.convert.rounding import Rounding
from megatron_dppo.errors import ConversionError


@dataclass(frozen=True)
class Options:
    """Options of writing a checkpoint.

    Attributes:
        dtype: Dtype that tensors are rounded to, except tensors that stay float32. None keeps the source's.
        file_bytes: Most bytes per file. A new file starts when the current one would exceed this.
        num_writers: Number of files that a process writes at a time.
        on_bytes: Callback, in any thread, with the bytes of each finished tensor.
        rounding: Object that casts the tensors, and adds up the loss.
    """

    dtype: torch.dtype | None = None
    file_bytes: int = 4 << 30
    num_writers: int = 1
    on_bytes: Callable[[int], object] = lambda _: None
    rounding: Rounding = field(default_factory=Rounding)

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor is written in."""
        return tensor.dtype if self.dtype is None or stays_float32(name) else self.dtype


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that --dtype names; None keeps the checkpoint's dtype.

    Raises:
        ConversionError: The name is not a supported dtype.
    """
    if name is None:
        return None
    if name not in ("float32", "bfloat16"):
        raise ConversionError(
            f"--dtype: found {name!r}; expected float32 or bfloat16. Leave it out to keep every bit."
        )
    return getattr(torch, name)
