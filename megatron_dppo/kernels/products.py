"""Matrix products of bfloat16 with float32 results, which cuBLAS has and PyTorch's CPU backend lacks."""

import torch
from torch import Tensor
from torch.library import custom_op


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
