"""The fused losses equal the loss by log-softmax and autograd, in float64 and to rounding in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import PRESETS, Objective, preset
from megatron_dppo.kernels import (
    fused_linear_policy_loss,
    fused_metrics,
    fused_policy_loss,
    linear_log_probs,
    linear_score_norms,
    score_norms,
)
from tests.support.loss_batches import Batch, make_batch, policy_loss_from_logits

VARIANTS: dict[str, Objective] = {
    **PRESETS,
    "entropy bonus": preset("dppo_topk_kl", entropy_coef=0.01),
    "capped": preset("dppo_binary_tv", ratio_cap=1.2, delta_low=0.01, delta_high=0.3),
    "replace": preset("dppo_topk_kl", sampled_token="replace", top_k=5),
    "without other": preset("dppo_topk_tv", include_other=False),
    "tight cppo": preset("cppo_topk", delta=0.1, prefix_delta=0.01, top_k=6),
    "tight mis": preset("mis", rho_low=0.98, rho_high=1.5),
    "tight trm": preset("trm", token_kl=0.1, response_kl=0.02, top_k=6),
    "wide gspo": preset("gspo", eps_low=0.05, eps_high=0.05, entropy_coef=0.1),
    "tight predictive": preset("dppo_topk_kl_predictive", delta=0.01, top_k=6),
    "tight estr": preset("estr", delta=0.05, eps_low=0.5, eps_high=2.0, top_k=6),
    "recomputed sat": preset("sat", stale_share=0.5, anchor="recomputed"),
    "recomputed gmpo": preset("gmpo", eps_low=0.05, anchor="recomputed", entropy_coef=0.1),
    "vespo with k1": preset("vespo", ref_kl_coef=0.04, ref_kl="k1"),
    "recomputed entropy": preset("minirl_tis", entropy_coef=0.5),
    "grpo with k3": preset("grpo", ref_kl_coef=0.04, entropy_coef=0.01),
    "capped k1": preset("dppo_topk_kl", ref_kl_coef=0.3, ref_kl="k1", ratio_cap=1.1, top_k=5),
    "gspo with k3": preset("gspo", ref_kl_coef=0.04),
    "log-ratio term": preset("ipo", delta=0.1, log_ratio_coef=1e-3),
    "own": preset("tests.support.own_rules:divergence_mask", rule_options={"delta": 0.01}, anchor="recomputed"),
    "own of responses": preset(
        "tests.support.own_rules:fading",
        rule_options={"delta": 0.5, "steady": 0.1},
        rule_divergence="topk_kl",
        rule_over="responses",
        top_k=6,
    ),
}
OF_HIDDEN_STATES = (
    "dppo_topk_kl",
    "entropy bonus",
    "pg_is",
    "negative_mask",
    "log-ratio term",
    "gspo",
    "cppo_topk",
    "tight mis",
    "tight estr",
    "sat",
    "vespo with k1",
    "minpro",
    "grpo with k3",
    "capped k1",
    "gspo with k3",
    "own of responses",
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
FIELDS = ("log_probs", "entropy", "topk_log_probs", "divergence", "ratio", "weight", "coefficient", "mask")


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
    named = {name: getattr(out, name) for name in ("loss_sum", *FIELDS[3:])}
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
@pytest.mark.parametrize("name", OF_HIDDEN_STATES)
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
    of_ratio = objective.log_ratio_coef * expected["ratio"].log().square().sum()
    size_of_terms = (expected["coefficient"] * expected["log_probs"]).abs().sum() + of_ratio
    if objective.ref_kl_coef != 0:
        size_of_terms += expected["loss_sum"].abs()
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
        replace(batch.layer, chunk_bytes=3000),
        loss_mask=m.loss_mask,
        topk_ids=m.topk_ids,
    )
    for name in ("log_probs", "entropy", "topk_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(out, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_score_norms_are_those_of_autograd(dtype: torch.dtype) -> None:
    exact, batch = make_batch(torch.float64), make_batch(dtype)
    hidden, m = exact.hidden.clone().requires_grad_(), exact.microbatch
    logits = (hidden @ exact.weight.T)[:, : exact.vocab_size] / exact.temperature
    log_probs = logits.log_softmax(1).gather(1, m.targets[:, None]).sum()
    (scores,) = torch.autograd.grad(log_probs, hidden)
    expected = torch.where(m.loss_mask, scores.norm(dim=1), 0.0)
    layer = replace(batch.layer, chunk_bytes=3000)
    found = linear_score_norms(batch.hidden, batch.weight, m.targets, layer, loss_mask=m.loss_mask)
    logits = batch.hidden @ batch.weight.T
    of_logits = score_norms(logits, batch.weight, m.targets, layer, loss_mask=m.loss_mask)
    for norms in (found, of_logits):
        assert norms.dtype == dtype
        assert relative(norms, expected) <= TOLERANCE[dtype]


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
