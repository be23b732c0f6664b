"""The fused losses on device tensors against float64 on the CPU: each objective, type and way to call them."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.kernels import (
    FusedPolicyLoss,
    fused_linear_policy_loss,
    fused_metrics,
    fused_policy_loss,
    linear_log_probs,
    linear_score_norms,
    ops,
)
from tests.support.loss_batches import Batch, make_batch
from tests.unit.test_fused_loss import FIELDS, OF_HIDDEN_STATES, VARIANTS, expected_of, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")
TOPK_KL = preset("dppo_topk_kl", top_k=6, entropy_coef=0.01)
FLOAT32, BFLOAT16 = 2e-5, 2e-2  # relative


def moved(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tensors on that device, the rest as it is."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in values.items()}


def on_cpu(out: FusedPolicyLoss) -> FusedPolicyLoss:
    """The same results, where those of the reference are."""
    named = {field.name: getattr(out, field.name) for field in fields(out)}
    return replace(out, **moved(named, torch.device("cpu")))


def batch_of(objective: Objective, **sizes: int) -> Batch:
    """A batch whose first token, nearly certain, does not learn: float32 does not know how certain it is."""
    batch = make_batch(torch.float32, top_k=objective.top_k, **sizes)
    batch.microbatch.loss_mask[0] = False
    return batch


def check(out: FusedPolicyLoss, expected: dict[str, Any], batch: Batch, objective: Objective) -> None:
    """Each field within what float32 resolves, and the metrics of the GPU those of the CPU."""
    found = on_cpu(out)
    of_ratio = objective.log_ratio_coef * expected["ratio"].log().square().sum()
    size_of_terms = (expected["coefficient"] * expected["log_probs"]).abs().sum() + of_ratio
    assert abs(found.loss_sum - expected["loss_sum"]) <= FLOAT32 * size_of_terms
    for field in FIELDS:
        if field != "divergence":
            assert relative(getattr(found, field), expected[field]) <= FLOAT32, field
    # A log-prob's rounding moves a KL of the two-outcome distribution by up to that over 1 - p.
    rest = -torch.expm1(expected["log_probs"].double().clamp(max=-1e-9))
    allowed = 5e-6 + 1e-5 * expected["divergence"] + 2e-7 / rest
    learns = batch.microbatch.loss_mask
    assert ((found.divergence - expected["divergence"]).abs() <= allowed)[learns].all()
    names = ("rollout_log_probs", "advantages", "loss_mask", "old_log_probs")
    tokens = {name: batch.arguments[name] for name in names}
    here, there = (
        fused_metrics(objective, found, **tokens),
        fused_metrics(objective, out, **moved(tokens, DEVICE)),
    )
    for name, value in here.items():
        assert relative(there[name].cpu(), value) <= FLOAT32, name


def grad(tensor: Tensor) -> Tensor:
    """A tensor's gradient on the CPU."""
    assert tensor.grad is not None
    return tensor.grad.cpu()


def leaf(values: Tensor) -> Tensor:
    """A copy on the GPU that wants a gradient."""
    return values.detach().to(DEVICE, copy=True).requires_grad_()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_from_logits_equals_float64(name: str, in_place: bool) -> None:
    objective = VARIANTS[name]
    batch = batch_of(objective)
    expected, gradient = expected_of(batch, objective, batch.logits.double())
    logits = leaf(batch.logits)
    arguments = moved(batch.arguments, DEVICE)
    out = fused_policy_loss(logits, **arguments, objective=objective, inplace_backward=in_place)
    (found,) = torch.autograd.grad(out.loss_sum, logits)
    check(out, expected, batch, objective)
    assert (found.data_ptr() == logits.data_ptr()) == in_place
    assert relative(found.cpu(), gradient) <= FLOAT32


@pytest.mark.parametrize("padding", [torch.nan, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_and_rows_that_do_not_learn_are_not_looked_at(dtype: torch.dtype, padding: float) -> None:
    batch = batch_of(TOPK_KL)
    logits = torch.nn.functional.pad(batch.logits.to(dtype), (0, 7), value=padding)
    logits[~batch.microbatch.loss_mask] = torch.nan
    expected, gradient = expected_of(batch, TOPK_KL, batch.logits.to(dtype).double())
    own = leaf(logits)
    out = fused_policy_loss(own, **moved(batch.arguments, DEVICE), objective=TOPK_KL)
    out.loss_sum.backward()
    check(out, expected, batch, TOPK_KL)
    limit = FLOAT32 if dtype == torch.float32 else 2**-8
    assert relative(grad(own)[:, : batch.vocab_size], gradient) <= limit
    assert not grad(own)[:, batch.vocab_size :].any() and not grad(own)[~batch.microbatch.loss_mask].any()


@pytest.mark.parametrize("chunk_tokens", [7, 1000])
@pytest.mark.parametrize("name", OF_HIDDEN_STATES)
def test_the_linear_form_equals_float64(name: str, chunk_tokens: int) -> None:
    objective = VARIANTS[name]
    batch = batch_of(objective)
    expected, by_logits = expected_of(batch, objective, batch.logits.double())
    by_logits = torch.nn.functional.pad(by_logits, (0, batch.weight.shape[0] - batch.vocab_size))
    hidden, weight = leaf(batch.hidden), leaf(batch.weight)
    arguments = moved(batch.arguments, DEVICE)
    chunk_bytes = chunk_tokens * weight.shape[0] * 4
    out = fused_linear_policy_loss(hidden, weight, **arguments, objective=objective, chunk_bytes=chunk_bytes)
    (3 * out.loss_sum).backward()
    check(out, expected, batch, objective)
    assert relative(grad(hidden), 3 * by_logits @ batch.weight.double()) <= FLOAT32
    assert relative(grad(weight), 3 * by_logits.T @ batch.hidden.double()) <= FLOAT32


@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
def test_bfloat16_hidden_states_accumulate_in_float32(logits_dtype: torch.dtype | None) -> None:
    batch = make_batch(torch.float32, num_tokens=600, vocab_size=500, padding=12)
    hidden, weight = leaf(batch.hidden.bfloat16()), torch.nn.Parameter(leaf(batch.weight.bfloat16()).detach())
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    rounded = replace(batch, hidden=hidden.detach().cpu().double(), weight=weight.detach().cpu().double())
    objective = preset("pg_is", ratio_cap=1e-3)  # no mask and no ratio that rounding could turn
    seen = rounded.logits if logits_dtype is not None else rounded.logits.bfloat16().double()
    _, by_logits = expected_of(batch, objective, seen)
    by_logits = torch.nn.functional.pad(by_logits, (0, 12))
    out = fused_linear_policy_loss(
        hidden,
        weight,
        **moved(batch.arguments, DEVICE),
        objective=objective,
        chunk_bytes=128 * 512 * 2,
        logits_dtype=logits_dtype,
    )
    out.loss_sum.backward()
    assert relative(grad(hidden), by_logits @ rounded.weight) <= BFLOAT16
    main_grad = weight.main_grad  # type: ignore[attr-defined]
    assert main_grad.dtype == torch.float32
    assert relative(main_grad.cpu(), by_logits.T @ rounded.hidden) <= BFLOAT16 / 2


def test_compacted_rows_equal_those_in_place() -> None:
    batch = make_batch(torch.float32)
    logits, arguments = batch.logits.to(DEVICE), moved(batch.arguments, DEVICE)
    out = fused_policy_loss(own := leaf(batch.logits), **arguments, objective=TOPK_KL)
    out.loss_sum.backward()
    rows = rows_of(arguments, logits, TOPK_KL)
    sources = torch.tensor([0, 39, 2, 37, 4], device=DEVICE)
    ops.logits_gradient_(logits, rows, arguments["targets"], None, sources, 0, batch.vocab_size, 0.7, True)
    assert own.grad is not None and torch.equal(logits[:5], own.grad[sources])


def rows_of(arguments: dict[str, Any], logits: Tensor, objective: Objective) -> Tensor:
    """[len(ROWS), T]: what the gradient is made from."""
    from megatron_dppo.kernels.combine import combine
    from megatron_dppo.kernels.encoding import encode

    a, size = arguments, arguments["vocab_size"]
    ids = a["topk_ids"]
    statistics = ops.row_statistics(logits, a["targets"], ids, a["loss_mask"], 0, size, a["temperature"], True)
    names = ("targets", "rollout_log_probs", "advantages", "loss_mask", "token_weights")
    tokens = [*(a[name] for name in names), None, ids, a["topk_rollout_log_probs"]]
    return combine(statistics[None], tokens, encode(objective))[0]


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
    arguments = moved(batch.arguments, DEVICE)
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
    arguments = moved(batch.arguments, DEVICE)
    return lambda logits: fused_policy_loss(logits * 1.5, **arguments, objective=TOPK_KL).loss_sum * 2


def test_inductor_compiles_one_graph() -> None:
    batch = make_batch(torch.float32)
    loss, eager_logits, logits = compiled_loss(batch), leaf(batch.logits), leaf(batch.logits)
    eager, found = loss(eager_logits), torch.compile(loss, fullgraph=True)(logits)
    eager.backward()
    found.backward()
    torch.testing.assert_close(found, eager, rtol=1e-6, atol=0)
    assert relative(grad(logits), grad(eager_logits)) <= 1e-6


def test_log_probs_without_gradient_take_the_same_path() -> None:
    batch = make_batch(torch.float32)
    hidden, weight = batch.hidden.to(DEVICE), batch.weight.to(DEVICE)
    arguments = moved(batch.arguments, DEVICE)
    out = fused_linear_policy_loss(hidden, weight, **arguments, objective=preset("pg_is"))
    chosen = {key: arguments[key] for key in ("loss_mask", "topk_ids")}
    layer = replace(batch.layer, chunk_bytes=3000)
    found = linear_log_probs(hidden, weight, arguments["targets"], layer, **chosen)
    for name in ("log_probs", "entropy", "topk_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(out, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_score_norms_are_those_of_float64(dtype: torch.dtype, tolerance: float) -> None:
    batch = make_batch(torch.float32)
    hidden, weight = batch.hidden.to(dtype), batch.weight.to(dtype)
    targets, mask = batch.microbatch.targets, batch.microbatch.loss_mask
    expected = linear_score_norms(hidden.double(), weight.double(), targets, batch.layer, loss_mask=mask)
    layer = replace(batch.layer, chunk_bytes=3000, logits_dtype=torch.float32)
    hidden, weight, targets, mask = (x.to(DEVICE) for x in (hidden, weight, targets, mask))
    found = linear_score_norms(hidden, weight, targets, layer, loss_mask=mask)
    assert relative(found.cpu(), expected) <= tolerance


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
    arguments = moved(batch.arguments, DEVICE)
    found = []
    for tp_group in (None, group):
        hidden, weight, logits = leaf(batch.hidden), leaf(batch.weight), leaf(batch.logits)
        split: dict[str, Any] = dict(tp_group=tp_group, objective=TOPK_KL)
        fused_policy_loss(logits, **arguments, **split).loss_sum.backward()
        out = fused_linear_policy_loss(hidden, weight, **arguments, **split, sequence_parallel=True)
        out.loss_sum.backward()
        found.append((out.log_probs, grad(logits), grad(hidden), grad(weight)))
    assert all(torch.equal(alone, grouped) for alone, grouped in zip(*found, strict=True))
