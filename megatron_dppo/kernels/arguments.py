"""Checks the tensors of a kernel call, and returns their addresses."""

import torch
from torch import Tensor

from megatron_dppo.errors import MegatronDppoError

MAX_TOP_K = 64
LOGITS_DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # and their numbers in capi.h


class KernelError(MegatronDppoError, RuntimeError):
    """A kernel library does not load, got invalid tensors, or reports a device error."""


class ArgumentChecker:
    """Turns the tensors of one call into addresses.

    Raises:
        KernelError: From every method: a kernel must not see this tensor.
    """

    def __init__(self, function: str, device_type: str, device: torch.device) -> None:
        self.function, self.device = function, device
        if device.type != device_type:
            self.fail("device", str(device), f"tensors on {device_type}, which this library was built for")

    def fail(self, name: str, found: str, expected: str) -> None:
        """Raise, naming the function and its argument."""
        raise KernelError(f"{self.function}: {name}: found {found}; expected {expected}.")

    def needed(self, name: str, tensor: Tensor | None, is_needed: bool) -> None:
        """Refuse a call without an input that the objective reads."""
        if is_needed and tensor is None:
            self.fail(name, "none", "a tensor, for this objective")

    def top_k(self, topk_ids: Tensor) -> int:
        """Return K of top-K ids [N, K]."""
        columns = topk_ids.shape[1] if topk_ids.dim() == 2 else 0
        if not 1 <= columns <= MAX_TOP_K:
            self.fail("topk_ids", f"shape {list(topk_ids.shape)}", f"[N, K] with K from 1 to {MAX_TOP_K}")
        return columns

    def logits(self, name: str, logits: Tensor, num_columns: int) -> int:
        """Return the number of rows of logits [N, columns], which may have padding columns and row strides."""
        if logits.dtype not in LOGITS_DTYPES:
            self.fail(name, str(logits.dtype), "float32 or bfloat16")
        if logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
            found = f"shape {list(logits.shape)} with strides {list(logits.stride())}"
            self.fail(name, found, "[N, columns] with neighbouring columns")
        if not 0 <= num_columns <= logits.shape[1]:
            self.fail(name, f"{logits.shape[1]} columns", f"at least num_columns = {num_columns}")
        if logits.device != self.device:
            self.fail(name, str(logits.device), str(self.device))
        return logits.shape[0]

    def pointer(
        self, name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> int | None:
        """Return a tensor's address; None for None."""
        if tensor is None:
            return None
        fits = (
            tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.is_contiguous()
            and tensor.device == self.device
        )
        if not fits:
            strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
            found = f"{tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"
            self.fail(name, found, f"contiguous {dtype} {list(shape)} on {self.device}")
        return tensor.data_ptr()
