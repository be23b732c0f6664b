"""The kernels' source, run on the host, against `policy_loss` in float64."""

import math
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.kernels.encoding import number_of
from tests.support.kernel_host import (
    PADDING,
    Exact,
    Result,
    Tokens,
    compiled_presets,
    exact_loss,
    random_tokens,
    run,
)

DTYPES = [torch.float32, torch.bfloat16]
NEAR_DELTA = 1e-4  # a mask may differ if the divergence is this close to its threshold

SATURATED = -1e-5


def assert_near(actual: torch.Tensor, exact: torch.Tensor, *, atol: float, rtol: float = 0.0) -> None:
    torch.testing.assert_close(actual.double(), exact.double(), atol=atol, rtol=rtol, equal_nan=True)


def decided(tokens: Tokens, objective: Objective, exact: Exact) -> torch.Tensor:
    """[N] bool: rows whose mask no rounding can turn."""
    anchor = tokens.old_log_probs if objective.anchor == "recomputed" else tokens.rollout_log_probs
    log_probs = exact.log_probs.gather(1, tokens.targets[:, None])[:, 0]
    if objective.rule == "none":
        return torch.ones_like(tokens.is_learning)
    if objective.rule == "ratio":
        ratio = (log_probs - anchor.double()).exp()
        bounds = (1 + number_of(objective, "eps_high"), 1 - number_of(objective, "eps_low"))
        return torch.stack([(ratio - bound).abs() > NEAR_DELTA for bound in bounds]).all(0)
    if objective.rule == "negative":
        return (anchor.double().exp() - log_probs.exp() - number_of(objective, "delta_low")).abs() > NEAR_DELTA
    deltas = [number_of(objective, side) for side in ("delta_low", "delta_high")]
    is_far = torch.stack([(exact.loss.divergence - delta).abs() > NEAR_DELTA for delta in deltas]).all(0)
    return is_far & ((log_probs - anchor.double()).abs() > 1e-5)


def assert_matches(tokens: Tokens, objective: Objective, result: Result, exact: Exact) -> None:
    learns, rows, out = tokens.is_learning, result.rows, exact.loss
    at_target = exact.log_probs.gather(1, tokens.targets[:, None])[:, 0]
    assert_near(rows["log_probs"], torch.where(learns, at_target, 0), atol=2e-5)
    assert_near(rows["entropy"], torch.where(learns, exact.entropy, 0), atol=5e-6)
    # Of a target this probable float32 does not know what is left; test_kernel_combine.py compares it there.
    known = (at_target < SATURATED) | (objective.divergence == "binary_tv")
    assert_near(rows["divergence"][known], out.divergence[known], atol=5e-6, rtol=1e-5)
    assert_near(rows["ratio"], out.ratio, atol=1e-6, rtol=2e-5)
    if result.topk_log_probs is not None:
        topk = exact.log_probs.gather(1, tokens.topk_ids.long().clamp(min=0))
        is_used = learns[:, None] & (tokens.topk_ids >= 0)
        assert_near(result.topk_log_probs, topk.masked_fill(~is_used, -math.inf), atol=2e-5)

    same = rows["weight"].bool() == out.mask
    assert not (~same & decided(tokens, objective, exact)).any()
    assert int(same.sum()) >= len(same) - 1
    assert_near(rows["coefficient"][same], out.coefficient[same], atol=1e-6, rtol=2e-5)
    weights = torch.where(learns, tokens.token_weights, 0).double()
    bonus = objective.entropy_coef * weights * torch.where(learns, exact.entropy, 0)
    scale = out.coefficient * weights
    loss = -torch.where(scale != 0, scale * at_target, 0) - bonus
    assert_near(rows["loss"][same], loss[same], atol=1e-5, rtol=1e-5)
    if bool(same.all()):
        assert float(rows["loss"].sum()) == pytest.approx(float(out.loss_sum.detach()), rel=1e-5, abs=1e-4)

    scale = (scale.abs() + objective.entropy_coef * weights)[:, None] / tokens.temperature
    is_half = tokens.logits.dtype == torch.bfloat16
    bound = scale * 1e-6 + exact.gradient.abs() * 2**-8 if is_half else scale * 5e-6
    error = (result.gradient.double() - exact.gradient).abs()
    assert not (error > bound)[same].any(), (error / scale)[same].nan_to_num().max()
    assert (result.gradient[same & (scale[:, 0] == 0)] == 0).all()
    assert (result.padding == 0).all()


# Each preset with another number of shards, dtype, temperature, K and padding.
OBJECTIVES = [
    *compiled_presets(20),
    preset("pg_is", entropy_coef=0.01),
    preset("dppo_binary_tv", entropy_coef=0.01, ratio_cap=1.2),
    preset("dppo_topk_tv", include_other=False, delta_low=0.05, delta_high=0.1),
    preset("dppo_topk_tv", sampled_token="replace", entropy_coef=0.01, delta=0.05),
    preset("dppo_topk_tv", sampled_token="replace", include_other=False, delta=0.05, top_k=40),
    preset("dppo_topk_kl", sampled_token="replace", delta=0.01, top_k=40),
    preset("dppo_topk_kl", top_k=64, delta_low=0.02, delta_high=0.03, ratio_cap=2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("index", range(len(OBJECTIVES)), ids=lambda i: f"{i}-{OBJECTIVES[i].name}")
def test_every_objective(kernels: Any, index: int, dtype: torch.dtype) -> None:
    objective = OBJECTIVES[index]
    top_k = objective.top_k if objective.needs_topk else (0, 3)[index % 2]
    tokens = random_tokens(24, 300, top_k, dtype=dtype, temperature=(1.0, 0.7)[index % 2], seed=index)
    result = run(kernels, tokens, objective, num_shards=(1, 2, 4, 8)[index % 4], poison=PADDING[index // 4 % 2])
    assert_matches(tokens, objective, result, exact_loss(tokens, objective))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_shards(kernels: Any, num_shards: int, dtype: torch.dtype) -> None:
    objective = preset("dppo_topk_kl", entropy_coef=0.01)
    tokens = random_tokens(12, 2011, 20, dtype=dtype, temperature=0.7, seed=num_shards)
    result = run(kernels, tokens, objective, num_shards=num_shards, poison=PADDING[num_shards % 2])
    assert_matches(tokens, objective, result, exact_loss(tokens, objective))
