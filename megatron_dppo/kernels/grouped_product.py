"""One matrix product for each group of rows, with a weight gradient of zero for an empty group."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

_FIRST_SM100_KERNEL = Version("2.9")


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by the transpose of the group's matrix.

    Args:
        rows: [N, in], sorted by group; the last group ends with the last row.
        weight: [groups, out, in].
        ends: [groups] int32, where each group ends.

    Returns:
        [N, out].
    """
    if not rows.shape[0]:  # F.grouped_mm refuses an expanded gradient without rows; the weight's is zero
        return rows @ weight[0].t()
    if _must_guard(rows.device):
        weight = with_zero_gradient_where_empty(weight, ends)
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def leaves_empty_groups_undefined(capability: tuple[int, int], torch_version: str) -> bool:
    """Return whether the weight gradient of `F.grouped_mm` may be garbage for groups without rows.

    PyTorch's kernel for sm_100, which later GPUs run too, writes old contents of its accumulator (pytorch
    #172439, CUTLASS #2674). CUTLASS 4.3 should fix it, but that issue is open, and so is one about NaN on
    sm_103 with torch 2.13 (#193633). No version counts as correct until a test passes on such a GPU.
    """
    return capability >= (10, 0) and Version(torch_version).release >= _FIRST_SM100_KERNEL.release


def with_zero_gradient_where_empty(weight: Tensor, ends: Tensor) -> Tensor:
    """Return the weight; its gradient is exactly zero for groups without rows, even if garbage arrives."""
    return _ZeroWhereEmpty.apply(weight, ends)


@cache
def _must_guard(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return leaves_empty_groups_undefined(torch.cuda.get_device_capability(device), torch.__version__)


class _ZeroWhereEmpty(torch.autograd.Function):
    """The identity; its backward pass overwrites the gradient of empty groups."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return gradients[0].masked_fill(is_empty[:, None, None], 0.0), None
