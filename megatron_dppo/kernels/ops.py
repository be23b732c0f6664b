"""The kernels and matrix products as PyTorch operators: shapes for tracing, and autograd.

On CUDA tensors they run the compiled kernels of `csrc/`, on others `reference.py`. Objectives are passed as the
numbers of `encoding.py`. The loss is differentiated only by the logits. Products of bfloat16 with float32
results are operators because cuBLAS has them and PyTorch's CPU backend does not.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from torch.library import custom_op

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import reference
from megatron_dppo.kernels.build import cuda_library
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.kernels.reference import ROWS, STATISTICS, LogitColumns, wide_dtype


@cache
def kernels_for(device_type: str) -> Any:
    """Return the three functions that compute on a type of device: `reference`'s or the compiled ones."""
    return KernelLibrary(cuda_library()) if is_compiled_for(device_type) else reference


def is_compiled_for(device_type: str) -> bool:
    """Returns whether the compiled kernels compute on such a device, and not `reference`."""
    return device_type == "cuda"


def kernels_of(tensor: Tensor) -> Any:
    """Return the functions that compute on the device of a tensor; see `kernels_for`."""
    return kernels_for(tensor.device.type)


# Arguments of each operator on logits, after its tensors; `LogitColumns.of` explains them.
_SETTINGS = "int vocab_start, int vocab_size, float temperature, bool with_entropy"


@custom_op(
    "megatron_dppo::row_statistics",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor targets, Tensor? topk_ids, Tensor? is_learning, {_SETTINGS}) -> Tensor",
)
def row_statistics(
    logits: Tensor, targets: Tensor, topk_ids: Tensor | None, is_learning: Tensor | None, *settings: Any
) -> Tensor:
    """[T, 4+K] of this shard's logits [T, V/shards]; see `reference.row_statistics`."""
    columns = LogitColumns.of(logits, *settings)
    return kernels_of(logits).row_statistics(logits, targets, topk_ids, is_learning, columns)


@row_statistics.register_fake
def _(logits: Tensor, targets: Tensor, topk_ids: Tensor | None, *_: Any) -> Tensor:
    width = STATISTICS + (0 if topk_ids is None else topk_ids.shape[1])
    return logits.new_empty((logits.shape[0], width), dtype=wide_dtype(logits))


@custom_op(
    "megatron_dppo::logits_gradient",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor rows, Tensor targets, Tensor? upstream, {_SETTINGS}) -> Tensor",
)
def logits_gradient(
    logits: Tensor, rows: Tensor, targets: Tensor, upstream: Tensor | None, *settings: Any
) -> Tensor:
    """[T, V/shards], the loss's gradient by the logits; see `reference.logits_gradient`."""
    columns, gradient = LogitColumns.of(logits, *settings), torch.empty_like(logits)
    kernels_of(logits).logits_gradient(logits, rows, targets, columns, upstream=upstream, out=gradient)
    return gradient


@logits_gradient.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


@custom_op(
    "megatron_dppo::logits_gradient_",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor rows, Tensor targets, Tensor? upstream, Tensor? sources, "
    f"{_SETTINGS}) -> ()",
)
def logits_gradient_(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    upstream: Tensor | None,
    sources: Tensor | None,
    *settings: Any,
) -> None:
    """Write the gradient over the logits, or, with `sources` [N], those rows' over the first N of them."""
    columns, out = LogitColumns.of(logits, *settings), logits if sources is None else logits[: sources.numel()]
    kernels_of(logits).logits_gradient(
        logits, rows, targets, columns, upstream=upstream, sources=sources, out=out
    )


@custom_op(
    "megatron_dppo::loss_of_rows",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor rows, Tensor targets, {_SETTINGS}, bool is_in_place) -> Tensor",
)
def loss_of_rows(logits: Tensor, rows: Tensor, targets: Tensor, *settings: Any) -> Tensor:
    """Sum the loss of the rows [len(ROWS), T] that `combine` made of the logits [T, V/shards]; a scalar.

    The logits are not read, but the loss is differentiated by them. If `is_in_place` is set, their gradient is
    written over them.
    """
    return rows[ROWS.index("loss")].sum()


@loss_of_rows.register_fake
def _(logits: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(())


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, rows, targets, *settings, is_in_place = inputs
    ctx.save_for_backward(logits, rows, targets)
    ctx.settings = settings
    ctx.is_in_place, ctx.is_spent = is_in_place, False


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.is_spent:
        raise ConfigError(
            Problem(
                "fused_policy_loss.inplace_backward",
                "a second backward pass (retain_graph)",
                "one: the first wrote the gradient over the logits",
                "Pass inplace_backward=False if the graph is used twice.",
            )
        )
    logits, rows, targets = ctx.saved_tensors
    if ctx.is_in_place:
        ctx.is_spent = True
        logits_gradient_(logits, rows, targets, upstream, None, *ctx.settings)
        gradient = logits
    else:
        gradient = logits_gradient(logits, rows, targets, upstream, *ctx.settings)
    return (gradient, *[None] * 7)


loss_of_rows.register_autograd(_backward, setup_context=_keep_for_backward)


@custom_op("megatron_dppo::wide_product", mutates_args=(), device_types="cpu")
def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Left @ right in float32, from bfloat16 or float32 [M, K] and [K, N]."""
    return left.float() @ right.float()


@wide_product.register_kernel("cuda")
def _wide_product_cuda(left: Tensor, right: Tensor) -> Tensor:
    if left.dtype == torch.float32:
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32)


@wide_product.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)


@custom_op("megatron_dppo::accumulate_product_", mutates_args=("total",), device_types="cpu")
def accumulate_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right; total [M, N] has the type of the factors, or a wider one."""
    total.addmm_(left.to(total.dtype), right.to(total.dtype))


@accumulate_product_.register_kernel("cuda")
def _accumulate_product_cuda(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


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

    PyTorch's kernel for sm_100, which later GPUs run too, writes its accumulator's old contents (pytorch
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
