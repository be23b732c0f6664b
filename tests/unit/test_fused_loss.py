"""The fused losses equal the loss by log-softmax and autograd, in float64 and to rounding in float32."""

from typing import Any

import pytest
import torch
from loss_batches import Batch, make_batch, policy_loss_from_logits

from megatron_dppo.algorithms import PRESETS, Objective, preset
from megatron_dppo.kernels import fused_linear_policy_loss, fused_metrics, fused_policy_loss, linear_log_probs

VARIANTS: dict[str, Objective] = {
    **PRESETS,
    "entropy bonus": preset("dppo_topk_kl", entropy_coef=0.01),
    "capped": preset("dppo_binary_tv", ratio_cap=1.2, delta_low=0.01, delta_high=0.3),
    "replace": preset("dppo_topk_kl", sampled_token="replace", top_k=5),
    "without other": preset("dppo_topk_tv", include_other=False),
    "recomputed entropy": preset("minirl_tis", entropy_coef=0.5),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
FIELDS = ("log_probs", "entropy", "topk_log_probs", "divergence", "ratio", "coefficient", "mask")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = (x.detach().double().nan_to_num(neginf=-1e3, posinf=1e3) for x in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


def expected_of(batch: Batch, objective: Objective, logits: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The long way's results, with those of a row that does not learn made neutral, and the gradient."""
    logits = logits.detach().clone().requires_grad_()
    out, tokens = policy_loss_from_logits(logits, batch.microbatch, objective, batch.temperature)
    out.loss_sum.backward()
    learns = batch.microbatch.loss_mask
    assert tokens.topk_log_probs is not None and logits.grad is not None
    named = {name: getattr(out, name) for name in ("loss_sum", "divergence", "ratio", "coefficient", "mask")}
    named |= {"log_probs": tokens.log_probs.where(learns, 0), "entropy": tokens.entropy.where(learns, 0)}
    named["topk_log_probs"] = tokens.topk_log_probs.where(learns[:, None], -torch.inf)
    return {**named, "metrics": out.metrics}, logits.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_from_logits_equals_autograd(name: str, dtype: torch.dtype) -> None:
    objective, batch = VARIANTS[name], make_batch(dtype, top_k=VARIANTS[name].top_k)
    expected, gradient = expected_of(batch, objective, batch.logits)
    logits = batch.logits.clone().requires_grad_()
    out = fused_policy_loss(logits, **batch.arguments, objective=objective)
    out.loss_sum.backward()
    assert logits.grad is not None
    check(out, expected, objective, batch, TOLERANCE[dtype])
    assert relative(logits.grad, gradient) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize("name", ["dppo_topk_kl", "entropy bonus", "pg_is", "negative_mask"])
def test_from_hidden_states_equals_autograd(name: str, chunk_tokens: int, dtype: torch.dtype) -> None:
    objective, batch = VARIANTS[name], make_batch(dtype, top_k=VARIANTS[name].top_k)
    hidden, weight = batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()
    expected, by_logits = expected_of(batch, objective, batch.logits)
    by_logits = torch.nn.functional.pad(by_logits, (0, weight.shape[0] - batch.vocab_size))
    chunk_bytes = chunk_tokens * weight.shape[0] * dtype.itemsize
    out = fused_linear_policy_loss(
        hidden, weight, **batch.arguments, objective=objective, chunk_bytes=chunk_bytes
    )
    (3 * out.loss_sum).backward()
    assert hidden.grad is not None and weight.grad is not None
    check(out, expected, objective, batch, TOLERANCE[dtype])
    assert relative(hidden.grad, 3 * by_logits @ batch.weight) <= TOLERANCE[dtype]
    assert relative(weight.grad, 3 * by_logits.T @ batch.hidden) <= TOLERANCE[dtype]


def check(out: Any, expected: dict[str, Any], objective: Objective, batch: Batch, tolerance: float) -> None:
    size_of_terms = (expected["coefficient"] * expected["log_probs"]).abs().sum()
    assert abs(out.loss_sum - expected["loss_sum"]) <= tolerance * size_of_terms
    for field in FIELDS:
        assert relative(getattr(out, field), expected[field]) <= tolerance, field
    m = batch.microbatch
    found = fused_metrics(
        objective, out, m.rollout_log_probs, m.advantages, m.loss_mask, old_log_probs=m.old_log_probs
    )
    for name, value in expected["metrics"].items():
        assert relative(found[name], value) <= tolerance, name


def test_log_probs_without_gradient_take_the_same_path() -> None:
    batch = make_batch(torch.float64)
    m, arguments = batch.microbatch, batch.arguments
    out = fused_linear_policy_loss(batch.hidden, batch.weight, **arguments, objective=preset("pg_is"))
    found = linear_log_probs(
        batch.hidden,
        batch.weight,
        m.targets,
        loss_mask=m.loss_mask,
        topk_ids=arguments["topk_ids"],
        temperature=batch.temperature,
        vocab_size=batch.vocab_size,
        chunk_bytes=3000,
    )
    for name in ("log_probs", "entropy", "topk_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(out, name), rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_bfloat16_output_layer_is_summed_over_chunks_in_float32() -> None:
    """500 chunks of one token give what one chunk gives; sums in bfloat16 are half a percent off."""
    batch, sums = make_batch(torch.float32, num_tokens=500), list[torch.Tensor]()
    for chunk_tokens in (1, 500):
        weight = batch.weight.bfloat16().requires_grad_()
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        out = fused_linear_policy_loss(
            batch.hidden.bfloat16(),
            weight,
            **batch.arguments,
            objective=PRESETS["dppo_binary_tv"],
            chunk_bytes=chunk_tokens * weight.shape[0] * 4,
            logits_dtype=torch.float32,
        )
        out.loss_sum.backward()
        sums.append(weight.main_grad)  # type: ignore[attr-defined]
    assert relative(*sums) <= 1e-4
