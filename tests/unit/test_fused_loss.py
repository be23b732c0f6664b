"""The fused losses equal the loss by log-softmax and autograd: each objective, form and implementation.

An implementation is PyTorch in float64 or float32, or the kernels' source, which is compiled for the host here
and for a GPU in tests/gpu/test_fused_loss_on_gpu.py. The latter runs these tests unchanged. Objectives that the
kernels do not know are combined in PyTorch, between kernels that read and write the logits.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import PRESETS, Objective, preset
from megatron_dppo.kernels import (
    FusedPolicyLoss,
    fused_linear_policy_loss,
    fused_metrics,
    fused_policy_loss,
    ops,
    score_norms,
    token_log_probs,
)
from megatron_dppo.kernels.combine import combine
from megatron_dppo.kernels.encoding import encode
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
TOPK_KL = preset("dppo_topk_kl", top_k=6, entropy_coef=0.01)
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
FIELDS = ("log_probs", "entropy", "topk_log_probs", "divergence", "ratio", "weight", "coefficient", "mask")
FLOAT32, BFLOAT16 = 2e-5, 2e-2  # relative


@dataclass(frozen=True)
class Implementation:
    """What computes a loss, and what it is compared with."""

    dtype: torch.dtype
    exact: torch.dtype  # in which log-softmax and autograd compute the expected values
    device: str = "cpu"

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.dtype == torch.float64 else FLOAT32

    def batch(self, objective: Objective, **sizes: int) -> Batch:
        """A batch with more Top-K columns than a divergence uses.

        The first token is nearly certain. In a comparison with float64 it does not learn, because float32 does
        not know how certain it is.
        """
        batch = make_batch(self.dtype, top_k=objective.top_k + 2, **sizes)
        batch.microbatch.loss_mask[0] = self.exact == self.dtype
        return batch

    def moved(self, values: dict[str, Any]) -> dict[str, Any]:
        """Tensors on the device, the rest as it is."""
        return {
            key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in values.items()
        }

    def leaf(self, values: Tensor) -> Tensor:
        """A copy on the device that wants a gradient."""
        return values.detach().to(self.device, copy=True).requires_grad_()


@pytest.fixture(params=["float64", "float32", "host", "host and float64"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """PyTorch or the kernels' source, compared in its own type or in float64."""
    dtype = torch.float64 if request.param == "float64" else torch.float32
    if "host" in request.param:
        library = request.getfixturevalue("host_library")
        monkeypatch.setattr(ops, "kernels_of", lambda tensor: library)
        monkeypatch.setattr(ops, "is_compiled_for", lambda device_type: True)  # which checks no values
    return Implementation(dtype, torch.float64 if "float64" in request.param else dtype)


FLOAT32_ONLY = pytest.mark.parametrize("implementation", ["host and float64"], indirect=True)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = (x.detach().double().nan_to_num(neginf=-1e3, posinf=1e3) for x in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


def expected_of(batch: Batch, objective: Objective, logits: Tensor) -> tuple[Any, Tensor]:
    """Results and gradient of the unfused loss, with neutral results in rows that do not learn."""
    logits = logits.detach().clone().requires_grad_()
    out, tokens = policy_loss_from_logits(logits, batch.microbatch, objective, batch.temperature)
    out.loss_sum.backward()
    learns = batch.microbatch.loss_mask
    assert tokens.topk_log_probs is not None and logits.grad is not None
    named = {name: getattr(out, name) for name in ("loss_sum", *FIELDS[3:])}
    named |= {"log_probs": tokens.log_probs.where(learns, 0), "entropy": tokens.entropy.where(learns, 0)}
    used = tokens.topk_log_probs[:, : objective.top_k if objective.needs_topk else None]
    named["topk_log_probs"] = used.where(learns[:, None], -torch.inf)
    return {**named, "metrics": out.metrics}, logits.grad


def grad(tensor: Tensor) -> Tensor:
    """A tensor's gradient on the CPU."""
    assert tensor.grad is not None
    return tensor.grad.cpu()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_from_logits_equals_autograd(name: str, in_place: bool, implementation: Implementation) -> None:
    objective = VARIANTS[name]
    batch = implementation.batch(objective)
    expected, gradient = expected_of(batch, objective, batch.logits.to(implementation.exact))
    logits, arguments = implementation.leaf(batch.logits), implementation.moved(batch.arguments)
    out = fused_policy_loss(logits, **arguments, objective=objective, inplace_backward=in_place)
    (found,) = torch.autograd.grad(out.loss_sum, logits)
    check(implementation, out, expected, objective, batch)
    assert (found.data_ptr() == logits.data_ptr()) == in_place
    assert relative(found.cpu(), gradient) <= implementation.tolerance


@FLOAT32_ONLY
@pytest.mark.parametrize("padding", [torch.nan, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_and_rows_that_do_not_learn_are_not_read(
    dtype: torch.dtype, padding: float, implementation: Implementation
) -> None:
    batch = implementation.batch(TOPK_KL)
    logits = torch.nn.functional.pad(batch.logits.to(dtype), (0, 7), value=padding)
    logits[~batch.microbatch.loss_mask] = torch.nan
    expected, gradient = expected_of(batch, TOPK_KL, batch.logits.to(dtype).double())
    own = implementation.leaf(logits)
    out = fused_policy_loss(own, **implementation.moved(batch.arguments), objective=TOPK_KL)
    out.loss_sum.backward()
    check(implementation, out, expected, TOPK_KL, batch)
    limit = FLOAT32 if dtype == torch.float32 else 2**-8
    assert relative(grad(own)[:, : batch.vocab_size], gradient) <= limit
    assert not grad(own)[:, batch.vocab_size :].any() and not grad(own)[~batch.microbatch.loss_mask].any()


def test_compacted_rows_equal_those_in_place(implementation: Implementation) -> None:
    batch = make_batch(implementation.dtype)
    logits, arguments = batch.logits.to(implementation.device), implementation.moved(batch.arguments)
    out = fused_policy_loss(own := implementation.leaf(logits), **arguments, objective=TOPK_KL)
    out.loss_sum.backward()
    targets, ids, mask = (arguments[name] for name in ("targets", "topk_ids", "loss_mask"))
    settings = batch.layer.settings(with_entropy=True)
    statistics = ops.row_statistics(logits, targets, ids, mask, *settings)[None]
    names = ("targets", "rollout_log_probs", "advantages", "loss_mask", "token_weights")
    tokens = [*(arguments[name] for name in names), None, ids, arguments["topk_rollout_log_probs"]]
    rows, _ = combine(statistics, tokens, encode(TOPK_KL))
    sources = torch.tensor([0, 39, 2, 37, 4], device=implementation.device)
    ops.logits_gradient_(logits, rows, targets, None, sources, *settings)
    assert own.grad is not None and torch.equal(logits[:5], own.grad[sources])


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
@pytest.mark.parametrize("name", OF_HIDDEN_STATES)
def test_from_hidden_states_equals_autograd(
    name: str, chunk_tokens: int, implementation: Implementation
) -> None:
    objective = VARIANTS[name]
    batch = implementation.batch(objective)
    hidden, weight = implementation.leaf(batch.hidden), implementation.leaf(batch.weight)
    expected, by_logits = expected_of(batch, objective, batch.logits.to(implementation.exact))
    by_logits = torch.nn.functional.pad(by_logits, (0, weight.shape[0] - batch.vocab_size))
    out = fused_linear_policy_loss(
        hidden,
        weight,
        **implementation.moved(batch.arguments),
        objective=objective,
        chunk_bytes=chunk_tokens * weight.shape[0] * weight.itemsize,
    )
    (3 * out.loss_sum).backward()
    check(implementation, out, expected, objective, batch)
    wide = implementation.exact
    assert relative(grad(hidden), 3 * by_logits @ batch.weight.to(wide)) <= implementation.tolerance
    assert relative(grad(weight), 3 * by_logits.T @ batch.hidden.to(wide)) <= implementation.tolerance


def check(
    implementation: Implementation,
    out: FusedPolicyLoss,
    expected: dict[str, Any],
    objective: Objective,
    batch: Batch,
) -> None:
    """Each field and metric, and the loss, within what the implementation's type resolves."""
    tolerance, on_cpu = implementation.tolerance, replace(implementation, device="cpu")
    found = replace(out, **on_cpu.moved({field.name: getattr(out, field.name) for field in fields(out)}))
    of_ratio = objective.log_ratio_coef * expected["ratio"].log().square().sum()
    size_of_terms = (expected["coefficient"] * expected["log_probs"]).abs().sum() + of_ratio
    if objective.ref_kl_coef != 0:
        size_of_terms += expected["loss_sum"].abs()
    assert abs(found.loss_sum - expected["loss_sum"]) <= tolerance * size_of_terms
    is_rounded = implementation.exact != implementation.dtype
    for field in FIELDS:
        if field != "divergence" or not is_rounded:
            assert relative(getattr(found, field), expected[field]) <= tolerance, field
    names = ("rollout_log_probs", "advantages", "loss_mask", "old_log_probs")
    tokens = {name: batch.arguments[name] for name in names}
    metrics = expected["metrics"]
    if is_rounded:
        # A log-prob's rounding moves a KL of the two-outcome distribution by up to that over 1 - p.
        rest = -torch.expm1(expected["log_probs"].double().clamp(max=-1e-9))
        allowed = 5e-6 + 1e-5 * expected["divergence"] + 2e-7 / rest
        learns = batch.microbatch.loss_mask
        assert ((found.divergence - expected["divergence"]).abs() <= allowed)[learns].all()
        metrics = fused_metrics(objective, found, **tokens)
    on_device = fused_metrics(objective, out, **implementation.moved(tokens))
    for name, value in metrics.items():
        assert relative(on_device[name].cpu(), value) <= tolerance, name


def test_log_probs_without_gradient_take_the_same_path(implementation: Implementation) -> None:
    batch = make_batch(implementation.dtype)
    arguments = implementation.moved(batch.arguments)
    hidden, weight = implementation.leaf(batch.hidden), implementation.leaf(batch.weight)
    out = fused_linear_policy_loss(hidden, weight, **arguments, objective=preset("pg_is"))
    chosen = {name: arguments[name] for name in ("loss_mask", "topk_ids")}
    layer = replace(batch.layer, chunk_bytes=3000)
    found = token_log_probs(hidden, weight, arguments["targets"], layer, **chosen)
    limit = 1e-12 if implementation.dtype == torch.float64 else 1e-5
    for name in ("log_probs", "entropy", "topk_log_probs"):
        torch.testing.assert_close(getattr(found, name), getattr(out, name), rtol=limit, atol=limit)


@pytest.mark.parametrize("is_half", [False, True])
def test_score_norms_are_those_of_autograd(is_half: bool, implementation: Implementation) -> None:
    batch, dtype = make_batch(implementation.dtype), torch.bfloat16 if is_half else implementation.dtype
    hidden, weight, m = batch.hidden.to(dtype), batch.weight.to(dtype), batch.microbatch
    exact = hidden.double().requires_grad_()
    logits = (exact @ weight.double().T)[:, : batch.vocab_size] / batch.temperature
    log_probs = logits.log_softmax(1).gather(1, m.targets[:, None]).sum()
    (scores,) = torch.autograd.grad(log_probs, exact)
    expected = torch.where(m.loss_mask, scores.norm(dim=1), 0.0)
    layer = replace(batch.layer, chunk_bytes=3000, logits_dtype=torch.float32)
    hidden, weight, targets, mask = (
        x.to(implementation.device) for x in (hidden, weight, m.targets, m.loss_mask)
    )
    found = score_norms(hidden, weight, targets, layer, loss_mask=mask)
    wide = implementation.dtype
    logits, applied = hidden.to(wide) @ weight.to(wide).T, replace(layer, is_applied=True)
    of_logits = score_norms(logits, weight, targets, applied, loss_mask=mask)
    for norms in (found, of_logits):
        assert norms.dtype == (torch.float32 if is_half else dtype)
        assert relative(norms.cpu(), expected) <= (BFLOAT16 if is_half else implementation.tolerance)


@FLOAT32_ONLY
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
def test_bfloat16_hidden_states_accumulate_in_float32(
    logits_dtype: torch.dtype | None, implementation: Implementation
) -> None:
    batch = make_batch(torch.float32, num_tokens=600, vocab_size=500, padding=12)
    hidden = implementation.leaf(batch.hidden.bfloat16())
    weight = torch.nn.Parameter(implementation.leaf(batch.weight.bfloat16()).detach())
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    rounded = replace(batch, hidden=hidden.detach().cpu().double(), weight=weight.detach().cpu().double())
    objective = preset("pg_is", ratio_cap=1e-3)  # no mask and no ratio that rounding could turn
    seen = rounded.logits if logits_dtype is not None else rounded.logits.bfloat16().double()
    _, by_logits = expected_of(batch, objective, seen)
    by_logits = torch.nn.functional.pad(by_logits, (0, 12))
    out = fused_linear_policy_loss(
        hidden,
        weight,
        **implementation.moved(batch.arguments),
        objective=objective,
        chunk_bytes=128 * 512 * 2,
        logits_dtype=logits_dtype,
    )
    out.loss_sum.backward()
    assert relative(grad(hidden), by_logits @ rounded.weight) <= BFLOAT16
    main_grad = weight.main_grad  # type: ignore[attr-defined]
    assert main_grad.dtype == torch.float32
    assert relative(main_grad.cpu(), by_logits.T @ rounded.hidden) <= BFLOAT16 / 2


def test_the_gradient_of_a_bfloat16_output_layer_is_summed_over_chunks_in_float32() -> None:
    """500 chunks of one token give what one chunk gives; sums in bfloat16 are half a percent off."""
    batch, sums = make_batch(torch.float32, num_tokens=500), list[Tensor]()
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
