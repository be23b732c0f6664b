"""The operators as PyTorch sees them, the bytes that a pass moves and allocates, and errors for bad input."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss, ops, packed_linear_policy_loss
from megatron_dppo.kernels.combine import combine
from megatron_dppo.kernels.encoding import decode, encode
from tests.support.loss_batches import Batch, make_batch, policy_loss_from_logits

TOPK_KL = preset("dppo_topk_kl", top_k=6, entropy_coef=0.01)


def statistics_arguments(batch: Batch, logits: torch.Tensor) -> tuple[Any, ...]:
    m = batch.microbatch
    assert m.topk is not None
    return (logits, m.targets, m.topk.ids, m.loss_mask, 0, batch.vocab_size, 0.7, True)


def combine_arguments(batch: Batch, logits: torch.Tensor) -> tuple[Any, ...]:
    m = batch.microbatch
    assert m.topk is not None
    statistics = ops.row_statistics(*statistics_arguments(batch, logits.detach()))[None]
    tokens = [m.targets, m.rollout_log_probs, m.advantages, m.loss_mask, m.token_weights, None]
    return (statistics, [*tokens, m.topk.ids, m.topk.log_probs], encode(TOPK_KL))


def test_opcheck_finds_nothing() -> None:
    batch = make_batch(torch.float32)
    logits = batch.logits
    torch.library.opcheck(ops.row_statistics, statistics_arguments(batch, logits))
    arguments = combine_arguments(batch, logits)
    torch.library.opcheck(combine, arguments)
    rows, _ = combine(*arguments)
    end = (0, batch.vocab_size, 0.7, True)
    targets, upstream = batch.microbatch.targets, torch.tensor(2.0)
    torch.library.opcheck(ops.loss_of_rows, (logits.clone().requires_grad_(), rows, targets, *end, False))
    torch.library.opcheck(ops.logits_gradient, (logits, rows, targets, upstream, *end))
    sources = torch.arange(5).flip(0)
    torch.library.opcheck(ops.logits_gradient_, (logits.clone(), rows, targets, None, sources, *end))


def test_it_compiles_as_one_graph() -> None:
    batch = make_batch(torch.float32)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return fused_policy_loss(logits * 1.5, **batch.arguments, objective=TOPK_KL).loss_sum * 2

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager_logits, logits = (batch.logits.clone().requires_grad_() for _ in range(2))
    eager, found = loss(eager_logits), compiled(logits)
    eager.backward()
    found.backward()
    assert torch.equal(found, eager)
    assert logits.grad is not None and eager_logits.grad is not None
    assert torch.equal(logits.grad, eager_logits.grad)


@pytest.mark.parametrize("objective", [TOPK_KL, preset("relax_both", alpha=0.2)])
def test_an_objective_survives_as_numbers(objective: Objective) -> None:
    found = decode(encode(objective))
    assert found == replace(objective, name=found.name)


def test_the_gradient_may_be_written_over_the_logits_once() -> None:
    batch = make_batch(torch.float32)
    kept, written = batch.logits.clone().requires_grad_(), (batch.logits.clone().requires_grad_() * 1.0)
    storage = written.data_ptr()
    fused_policy_loss(kept, **batch.arguments, objective=TOPK_KL).loss_sum.backward()
    out = fused_policy_loss(written, **batch.arguments, objective=TOPK_KL, inplace_backward=True)
    (gradient,) = torch.autograd.grad(out.loss_sum, written, retain_graph=True)
    assert gradient.data_ptr() == storage
    assert kept.grad is not None and torch.equal(gradient, kept.grad)
    with pytest.raises(ConfigError, match="retain_graph"):
        torch.autograd.grad(out.loss_sum, written)


@pytest.mark.parametrize("is_scale_known", [False, True])
def test_megatrons_buffer_gets_the_weights_gradient(is_scale_known: bool) -> None:
    batch = make_batch(torch.float32)
    hidden, others = (batch.hidden.clone().requires_grad_() for _ in range(2))
    weight, other = (torch.nn.Parameter(batch.weight.clone()) for _ in range(2))
    buffer = torch.ones_like(weight)
    weight.main_grad = buffer  # type: ignore[attr-defined]
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    tokens, layer = batch.microbatch, replace(batch.layer, chunk_bytes=3000)
    scale = torch.tensor([2.0]) if is_scale_known else None
    for states, parameter in ((hidden, weight), (others, other)):
        known = scale if parameter is weight else None
        out = packed_linear_policy_loss(states, parameter, tokens, TOPK_KL, layer, loss_scale=known)
        (2 * out.loss_sum).backward()
    assert other.grad is not None and weight.grad is not None
    torch.testing.assert_close(buffer - 1, other.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, others.grad, rtol=1e-5, atol=1e-6)
    # Megatron adds to its buffer what autograd got for an embedding's weight: nothing.
    assert weight.grad_added_to_main_grad and not weight.grad.any()  # type: ignore[attr-defined]


def test_a_known_loss_scale_spares_every_buffer_of_the_weights_size() -> None:
    """One tensor of that size is allocated, which autograd gets and nobody writes; else a second, of sums."""
    batch, allocated = make_batch(torch.float32, num_tokens=64, vocab_size=1500), list[list[int]]()
    tokens, layer = batch.microbatch, replace(batch.layer, chunk_bytes=4 * 1500 * 4)
    for scale in (None, torch.ones(())):
        weight = torch.nn.Parameter(batch.weight.clone())
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        with Traffic(weight.numel()) as traffic:
            out = packed_linear_policy_loss(batch.hidden, weight, tokens, TOPK_KL, layer, loss_scale=scale)
            out.loss_sum.backward()
        allocated.append([size for size in traffic.allocations if size >= weight.nbytes])
        if scale is not None:
            assert [name for name in traffic.names if name.startswith("zeros")] == []
    assert [len(sizes) for sizes in allocated] == [2, 1]


def test_wrong_loss_scale_in_backward_is_refused() -> None:
    batch = make_batch(torch.float32)
    weight = torch.nn.Parameter(batch.weight.clone())
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    tokens, layer = batch.microbatch, replace(batch.layer, chunk_bytes=3000)
    out = packed_linear_policy_loss(batch.hidden, weight, tokens, TOPK_KL, layer, loss_scale=torch.tensor(2.0))
    with pytest.raises(RuntimeError, match="loss_scale"):
        out.loss_sum.backward()


def test_unneeded_gradients_are_not_computed() -> None:
    batch = make_batch(torch.float32)
    hidden = batch.hidden.clone().requires_grad_()
    with torch.no_grad():
        out = fused_linear_policy_loss(hidden, batch.weight, **batch.arguments, objective=TOPK_KL)
    assert not out.loss_sum.requires_grad
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        fused_linear_policy_loss(hidden, batch.weight, **batch.arguments, objective=TOPK_KL)
    learns, weighs = batch.microbatch.loss_mask, batch.microbatch.token_weights.nan_to_num() != 0
    learning, live = int(learns.sum()), int((learns & weighs).sum())  # the entropy moves masked ones, too
    assert counter.get_total_flops() == 2 * batch.weight.numel() * (learning + live)


# A product behind an operator: left [M, N] and right [N, K] follow the total.
PRODUCTS = {
    torch.ops.megatron_dppo.accumulate_product_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]
}


class Traffic(TorchDispatchMode):
    """Which operators touch tensors of at least so many elements, and how many bytes are allocated."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names, self.allocations = size, list[str](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        outputs = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage().data_ptr() for x in inputs}
        new = [x.nbytes for x in outputs if x.untyped_storage().data_ptr() not in known]
        if any(x.numel() >= self.size for x in inputs + outputs) and (new or not outputs):
            self.names.append(func.name().partition("::")[2].partition(".")[0])
        self.allocations += new
        return out


def test_logits_are_read_once_and_their_gradient_written_over_them() -> None:
    """Two bytes per bfloat16 logit forward and four backward; and some numbers per token."""
    batch = make_batch(torch.float32, num_tokens=64, vocab_size=4000, padding=96)
    logits = (batch.hidden @ batch.weight.T).bfloat16().requires_grad_() * 1.0
    with Traffic(logits.numel()) as forward:
        out = fused_policy_loss(logits, **batch.arguments, objective=TOPK_KL, inplace_backward=True)
    with Traffic(logits.numel()) as backward:
        torch.autograd.grad(out.loss_sum, logits)
    # loss_of_rows carries the logits to the backward pass and does not look at them.
    assert forward.names == ["row_statistics", "loss_of_rows"]
    assert backward.names == ["logits_gradient_"]
    assert sum(forward.allocations + backward.allocations) < 64 * 4 * 100 < logits.nbytes / 10


@pytest.mark.parametrize("name", ["dppo_binary_tv", "negative_mask"])
def test_masked_tokens_cost_one_product_of_three(name: str) -> None:
    batch, objective = make_batch(torch.float32, num_tokens=600, vocab_size=500), preset(name, delta=0.01)
    out = fused_policy_loss(batch.logits, **batch.arguments, objective=objective)
    weighs = batch.microbatch.token_weights.nan_to_num() != 0
    learning, live = int(batch.microbatch.loss_mask.sum()), int(((out.coefficient != 0) & weighs).sum())
    assert live < 0.9 * learning
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    chunk_bytes = 128 * weight.shape[0] * 4
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter, Traffic(0) as traffic:
        result = fused_linear_policy_loss(
            hidden, weight, **batch.arguments, objective=objective, chunk_bytes=chunk_bytes
        )
        result.loss_sum.backward()
    assert counter.get_total_flops() == 2 * weight.numel() * (learning + 2 * live)
    assert max(traffic.allocations) <= max(chunk_bytes, weight.nbytes, 11 * 4 * 600)


def arguments_with(batch: Batch, **changes: Any) -> dict[str, Any]:
    return batch.arguments | changes


def changed(name: str, row: int, value: float) -> Callable[[Batch], dict[str, Any]]:
    def change(batch: Batch) -> dict[str, Any]:
        values = batch.arguments[name].clone()
        values[row] = value
        return {name: values}

    return change


REFUSED: dict[str, tuple[Callable[[Batch], dict[str, Any]], str]] = {
    "target outside": (changed("targets", 7, 97), r"targets.*97 in row 7.*97 of the vocabulary"),
    "top-K id outside": (changed("topk_ids", 6, 200), r"topk_ids.*200 in row 6"),
    "repeated ids": (changed("topk_ids", 6, 4), r"topk.ids.*4, 4, 4.*position 6"),
    "nan advantage": (changed("advantages", 3, torch.nan), r"advantages.*nan at position 3"),
    "rollout -inf": (changed("rollout_log_probs", 0, -torch.inf), r"rollout_log_probs.*-inf at position 0"),
    "negative weight": (changed("token_weights", 1, -1.0), r"token_weights.*-1 at position 1"),
    "few columns": (lambda b: {"topk_ids": b.arguments["topk_ids"][:, :5]}, r"5 columns.*at least top_k = 6"),
    "no top-K": (lambda b: {"topk_ids": None, "topk_rollout_log_probs": None}, r"topk_ids.*topk_kl"),
    "short advantages": (lambda b: {"advantages": b.arguments["advantages"][:-1]}, r"shape \[39\].*\[40\]"),
    "integer advantages": (lambda b: {"advantages": b.arguments["targets"]}, r"advantages.*int64"),
    "float targets": (lambda b: {"targets": b.arguments["advantages"]}, r"targets.*float32"),
    "no cover": (lambda b: {"vocab_size": 120}, r"vocab_start.*columns 0 to 97.*cover the 120"),
    "shifted": (lambda b: {"vocab_start": 5}, r"vocab_start"),
    "temperature": (lambda b: {"temperature": 0.0}, r"temperature"),
    "no lengths": (lambda b: {"response_lengths": None}, r"response_lengths of gspo: found none"),
    "short lengths": (
        lambda b: {"response_lengths": torch.tensor([39])},
        r"response_lengths of gspo: found 39 \(sum 39\).*sum to 40",
    ),
    "negative length": (
        lambda b: {"response_lengths": torch.tensor([41, -1])},
        r"response_lengths of gspo: found 41, -1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_error_for_bad_input_names_the_input_and_position(case: str) -> None:
    batch = make_batch(torch.float32)
    change, message = REFUSED[case]
    arguments = batch.arguments | change(batch)
    if "columns" in case:
        arguments["topk_rollout_log_probs"] = arguments["topk_rollout_log_probs"][:, :5]
    objective = preset("gspo") if "length" in case else TOPK_KL
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        fused_policy_loss(batch.logits, **arguments, objective=objective, debug=True)
    if case not in ("few columns", "no cover", "shifted"):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            fused_linear_policy_loss(batch.hidden, batch.weight, **arguments, objective=objective, debug=True)


@pytest.mark.parametrize("name", ["gspo", "trm", "ipo"])
def test_debug_finds_nothing_in_good_input(name: str) -> None:
    batch = make_batch(torch.float32, top_k=20)
    loud, quiet = (
        fused_policy_loss(batch.logits, **batch.arguments, objective=preset(name), debug=debug).loss_sum
        for debug in (True, False)
    )
    assert torch.equal(loud, quiet)


@pytest.mark.parametrize("case", ["nan advantage", "repeated ids", "target outside"])
def test_debug_refuses_bad_input_before_any_kernel_runs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "kernels_of", None)
    batch = make_batch(torch.float32)
    change, message = REFUSED[case]
    arguments = batch.arguments | change(batch)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        fused_linear_policy_loss(batch.hidden, batch.weight, **arguments, objective=TOPK_KL, debug=True)


def test_half_precision_logits_are_refused() -> None:
    batch = make_batch(torch.float32)
    with pytest.raises(ConfigError, match="float16"):
        fused_policy_loss(batch.logits.half(), **batch.arguments, objective=TOPK_KL)


def test_hidden_states_and_weight_must_fit() -> None:
    batch = make_batch(torch.float32)
    with pytest.raises(ConfigError, match="of one type"):
        fused_linear_policy_loss(batch.hidden, batch.weight.double(), **batch.arguments, objective=TOPK_KL)


def test_a_top_k_of_the_whole_vocabulary_needs_no_more_columns() -> None:
    batch = make_batch(torch.float64, vocab_size=5, padding=0, top_k=5)
    out = fused_policy_loss(batch.logits, **batch.arguments, objective=preset("dppo_topk_kl", top_k=20))
    assert out.topk_log_probs is not None and out.topk_log_probs.shape == (40, 5)
    m = batch.microbatch
    expected, _ = policy_loss_from_logits(batch.logits, m, preset("dppo_topk_kl", top_k=5), batch.temperature)
    torch.testing.assert_close(out.divergence, expected.divergence, rtol=1e-9, atol=1e-12)
