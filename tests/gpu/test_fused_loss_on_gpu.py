"""The fused losses on a GPU: the tests of tests/unit/test_fused_loss.py, and what only a GPU can show."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss
from tests.support.loss_batches import Batch, make_batch
from tests.unit import test_fused_loss
from tests.unit.test_fused_loss import TOPK_KL, Implementation, grad, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
ON_GPU = Implementation(torch.float32, torch.float64, "cuda")
moved, leaf = ON_GPU.moved, ON_GPU.leaf
for _name in [name for name in vars(test_fused_loss) if name.startswith("test_")]:
    globals()[_name] = getattr(test_fused_loss, _name)


@pytest.fixture
def implementation() -> Implementation:
    """The compiled kernels, for the tests of the host's."""
    return ON_GPU


def test_more_logits_than_31_bits_count() -> None:
    num, columns, start = 14336, 151936, 14130  # 2^31 elements end in row 14134
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(num, columns, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    rows = torch.tensor([0, 1, *range(start, start + 8), num - 1], device=DEVICE)
    targets = torch.randint(columns, (num,), generator=generator, device=DEVICE)
    targets[-1] = columns - 1
    seen = logits[rows].double()
    log_probs = seen.log_softmax(-1)
    at_targets = log_probs.gather(1, targets[rows, None])[:, 0]
    leaf = logits.requires_grad_()
    ones = torch.ones(num, device=DEVICE)
    out = fused_policy_loss(leaf, targets, -12 * ones, ones, preset("pg_is"), inplace_backward=True)
    torch.testing.assert_close(out.log_probs[rows].double(), at_targets, atol=2e-5, rtol=0)
    (gradient,) = torch.autograd.grad(out.loss_sum, leaf)
    expected = log_probs.exp()
    expected.scatter_add_(1, targets[rows, None], -torch.ones_like(at_targets)[:, None])
    assert relative(gradient[rows], expected * out.coefficient[rows, None]) <= 2**-8
    assert all(bool(part.isfinite().all()) for part in gradient.split(1024))


@pytest.mark.parametrize("form", ["logits", "linear"])
def test_two_runs_give_the_same_bits(form: str) -> None:
    batch = make_batch(torch.float32, num_tokens=600, vocab_size=3000)
    arguments = moved(batch.arguments)
    found = []
    for _ in range(2):
        if form == "logits":
            leaves = (leaf(batch.logits),)
            out = fused_policy_loss(*leaves, **arguments, objective=TOPK_KL)
        else:
            leaves = leaf(batch.hidden), leaf(batch.weight)
            chunk = 128 * batch.weight.shape[0] * 4
            out = fused_linear_policy_loss(*leaves, **arguments, objective=TOPK_KL, chunk_bytes=chunk)
        found.append((out.loss_sum.detach(), out.log_probs, *torch.autograd.grad(out.loss_sum, leaves)))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def compiled_loss(batch: Batch) -> Callable[[Tensor], Tensor]:
    """A loss with work before and after ours, for one graph."""
    arguments = moved(batch.arguments)
    return lambda logits: fused_policy_loss(logits * 1.5, **arguments, objective=TOPK_KL).loss_sum * 2


def test_inductor_compiles_one_graph() -> None:
    batch = make_batch(torch.float32)
    loss, eager_logits, logits = compiled_loss(batch), leaf(batch.logits), leaf(batch.logits)
    eager, found = loss(eager_logits), torch.compile(loss, fullgraph=True)(logits)
    eager.backward()
    found.backward()
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=0)
    assert relative(grad(logits), grad(eager_logits)) <= 1e-6


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """NCCL ranks: this one."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=DEVICE_0)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


DEVICE_0 = torch.device("cuda", 0)


def test_a_group_of_one_rank_equals_none(group: dist.ProcessGroup) -> None:
    batch = make_batch(torch.float32)
    arguments = moved(batch.arguments)
    found = []
    for tp_group in (None, group):
        hidden, weight, logits = leaf(batch.hidden), leaf(batch.weight), leaf(batch.logits)
        split: dict[str, Any] = dict(tp_group=tp_group, objective=TOPK_KL)
        fused_policy_loss(logits, **arguments, **split).loss_sum.backward()
        out = fused_linear_policy_loss(hidden, weight, **arguments, **split, sequence_parallel=True)
        out.loss_sum.backward()
        found.append((out.log_probs, grad(logits), grad(hidden), grad(weight)))
    assert all(torch.equal(alone, grouped) for alone, grouped in zip(*found, strict=True))
