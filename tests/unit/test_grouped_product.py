"""Weight gradients of groups without rows: which GPUs need a guard, and that the guard makes them zero."""

import pytest
import torch
from torch import Tensor

from megatron_dppo.kernels.ops import (
    grouped_product,
    leaves_empty_groups_undefined,
    with_zero_gradient_where_empty,
)


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((8, 0), "2.13.0", False),
        ((9, 0), "2.13.0+cu130", False),  # H100, H200
        ((10, 0), "2.13.0+cu130", True),  # B200
        ((10, 3), "2.13.0", True),  # B300
        ((12, 0), "2.14.0", True),
        ((10, 0), "2.9.0a0+git123", True),
        ((10, 0), "2.8.0", False),  # has no kernel for it
    ],
)
def test_guarded_gpus_and_versions(capability: tuple[int, int], version: str, expected: bool) -> None:
    assert leaves_empty_groups_undefined(capability, version) is expected


@pytest.mark.parametrize("sizes", [[5, 0, 3, 0], [0, 0, 4, 1], [2, 3, 1, 6], [0, 0, 0, 0]])
def test_garbage_of_empty_groups_becomes_zero(sizes: list[int]) -> None:
    ends = torch.tensor(sizes).cumsum(0).int()
    weight = torch.randn(4, 6, 8, requires_grad=True)
    garbage = torch.where(torch.tensor(sizes)[:, None, None] == 0, torch.nan, torch.randn(4, 6, 8))
    with_zero_gradient_where_empty(weight, ends).backward(garbage)
    assert weight.grad is not None
    assert torch.equal(weight.grad, garbage.nan_to_num(0.0))


def test_a_rank_without_rows_has_gradients_of_zero_also_for_an_expanded_one() -> None:
    """`F.grouped_mm` refuses the gradient of a sum, which has no strides."""
    rows = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(4, 6, 8, requires_grad=True)
    output = grouped_product(rows, weight, torch.zeros(4, dtype=torch.int32))
    output.backward(torch.ones(()).expand(0, 6))
    assert output.shape == (0, 6) and rows.grad is not None and rows.grad.shape == (0, 8)
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_the_guard_changes_nothing_where_the_kernel_is_right() -> None:
    ends = torch.tensor([5, 5, 8, 12], dtype=torch.int32)
    rows, weight = torch.randn(12, 8), torch.randn(4, 4, 8)

    def gradients(is_guarded: bool) -> list[Tensor]:
        x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        used = with_zero_gradient_where_empty(w, ends) if is_guarded else w
        output = grouped_product(x, used, ends)
        output.square().sum().backward()
        assert x.grad is not None and w.grad is not None
        return [output, x.grad, w.grad]

    for plain, guarded in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, guarded)
    assert not gradients(True)[2][1].any(), "the second group has no rows"
