"""Every algorithm against exact values (mpmath, 60 digits) of tests/vectors/dppo_vectors.json."""

import math
from itertools import chain

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import (
    PRESETS,
    PolicyLossInputs,
    PolicyLossOutput,
    TopKLogProbs,
    binary_kl,
    binary_tv,
    group_advantages,
    policy_loss,
    preset,
    token_weights,
)
from megatron_dppo.algorithms.presets import FIELD
from tests.support.dppo_vectors import CASES, SETTINGS, VECTORS, build, column, is_decided, log_softmax

EVERY_SETTING = pytest.mark.parametrize("setting", SETTINGS)
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_settings_cover_vectors_and_presets():
    assert set(SETTINGS) == set(VECTORS["header"]["algorithms"]) == set(CASES[0]["algos"])
    assert {name for name, _ in SETTINGS.values()} == set(PRESETS) - {objective.name for objective in FIELD}


def run_case(setting: str, case: dict, dtype: torch.dtype) -> tuple[PolicyLossOutput, Tensor]:
    """The output of one token, and the gradient of the policy's logits."""
    logits, pi = log_softmax(case, "pi", dtype)
    mu, old = (log_softmax(case, which, dtype)[1].detach() for which in ("mu", "old"))
    ids = torch.tensor(case["topk_ids_mu"])
    a = case["a"]
    out = policy_loss(
        build(setting, case["K"]),
        PolicyLossInputs(
            log_probs=pi[a : a + 1],
            rollout_log_probs=mu[a : a + 1],
            advantages=torch.tensor([case["A"]], dtype=dtype),
            old_log_probs=old[a : a + 1],
            topk=TopKLogProbs(ids[None], mu[ids][None], pi.detach()[ids][None]),
            targets=torch.tensor([a]),
        ),
    )
    out.loss_sum.backward()
    assert logits.grad is not None
    return out, logits.grad


@EVERY_SETTING
@BOTH_DTYPES
def test_vectors(setting: str, dtype: torch.dtype):
    rtol, atol, roundoff = (1e-11, 1e-13, 1e-12) if dtype == torch.float64 else (5e-5, 3e-6, 1e-5)
    num_decided = 0
    for case in CASES:
        where = f"{setting} {case['id']} {case['tag']}"
        expected = case["algos"][setting]
        out, grad = run_case(setting, case, dtype)
        assert {out.loss_sum.dtype, out.ratio.dtype, out.divergence.dtype, out.coefficient.dtype} == {dtype}

        def close(actual, exact, where=where, atol=atol):
            assert float(actual) == pytest.approx(float(exact), rel=rtol, abs=atol), where

        close(out.ratio, case["ratio"])
        close(out.divergence, case["D"][column(setting)])
        assert out.mask.dtype == torch.bool
        if not is_decided(expected, case["ratio"], roundoff):
            continue
        num_decided += 1
        assert bool(out.mask) == bool(expected["mask"]), where
        close(out.coefficient, expected["coef"])
        close(out.loss_sum.detach(), expected["loss_sg"], atol=atol * (1 + abs(expected["coef"])))
        for actual, exact in zip(grad.tolist(), expected["dlogits"], strict=True):
            close(actual, exact, atol=atol * (1 + abs(expected["coef"])))
    assert num_decided > 0.9 * len(CASES)


@EVERY_SETTING
def test_vectors_in_one_padded_batch(setting: str):
    num_columns = max(len(case["topk_ids_mu"]) for case in CASES)
    rows = []
    for case in CASES:
        pi, mu, old = (log_softmax(case, which, torch.float64)[1].detach() for which in ("pi", "mu", "old"))
        ids = case["topk_ids_mu"]
        pad = [-1] * (num_columns - len(ids))
        garbage = torch.full((len(pad),), math.nan)
        topk = (torch.tensor(ids + pad), torch.cat([mu[ids], garbage]), torch.cat([pi[ids], garbage]))
        rows.append((pi[case["a"]], mu[case["a"]], old[case["a"]], *topk))
    log_probs, rollout, old, ids, topk_rollout, topk_pi = map(torch.stack, zip(*rows, strict=True))
    out = policy_loss(
        build(setting, num_columns),
        PolicyLossInputs(
            log_probs=log_probs,
            rollout_log_probs=rollout,
            advantages=torch.tensor([case["A"] for case in CASES]),
            old_log_probs=old,
            topk=TopKLogProbs(ids.int(), topk_rollout, topk_pi),
            targets=torch.tensor([case["a"] for case in CASES]),
        ),
    )
    expected = torch.tensor([float(case["D"][column(setting)]) for case in CASES], dtype=torch.float64)
    torch.testing.assert_close(out.divergence, expected, rtol=1e-11, atol=1e-13)
    for row, case in enumerate(CASES):
        if is_decided(case["algos"][setting], case["ratio"], 1e-12):
            assert bool(out.mask[row]) == bool(case["algos"][setting]["mask"]), case["id"]


@BOTH_DTYPES
@pytest.mark.parametrize("copies", [1, 16], ids=["scalar", "vectorised"])
@pytest.mark.parametrize("case", VECTORS["prob_level"], ids=lambda case: case["note"][:30])
def test_exact_probabilities(case: dict, dtype: torch.dtype, copies: int):
    mu, pi = (torch.full((copies,), case[p], dtype=dtype).log() for p in ("mu_a", "pi_a"))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert float(binary_tv(pi, mu)[0]) == pytest.approx(case["tv_bin"], abs=tolerance)
    assert float(binary_kl(pi, mu)[0]) == pytest.approx(float(case["kl_bin"]), abs=tolerance)
    if case["mu_a"] == 0:
        return  # policy_loss refuses it: see test_algorithms_loss.py
    inputs = PolicyLossInputs(pi, mu, torch.full((copies,), case["A"], dtype=dtype))
    is_exact = (
        dtype == torch.float64 or "2^-30" not in case["note"]
    )  # float32 rounds that case onto the boundary
    expected = {
        "dppo_binary_tv": case["mask_tv_strict"],
        "dppo_binary_kl": case["mask_kl_strict"],
        "negative_mask": case["mask_neg_geq"] if is_exact else 0,
    }
    for name, mask in expected.items():
        out = policy_loss(preset(name, delta=case["delta"]), inputs)
        assert out.mask.tolist() == [bool(mask)] * copies, name
        assert out.ratio[0].item() == pytest.approx(case["ratio"], rel=tolerance)


@pytest.mark.parametrize("case", VECTORS["aggregation"], ids=lambda case: str(case["lens"]))
@pytest.mark.parametrize(
    "mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
)
def test_aggregation(case: dict, mode: str):
    losses = torch.tensor(list(chain.from_iterable(case["per_token_loss"])), dtype=torch.float64)
    for lengths in (torch.tensor(case["lens"]), [*case["lens"], 0]):
        weights = token_weights(mode, lengths, case["response_length"])
        assert weights.shape == losses.shape
        assert (weights * losses).sum().item() == pytest.approx(case[mode], rel=1e-12)


@pytest.mark.parametrize("case", VECTORS["advantages"], ids=lambda case: f"{len(case['rewards'])} rewards")
@BOTH_DTYPES
def test_advantages(case: dict, dtype: torch.dtype):
    rewards = torch.tensor(case["rewards"], dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for field, normalize_std in (("adv_no_std", False), ("adv_std_eps1e6", True)):
        actual = group_advantages(rewards, torch.full_like(rewards, 7, dtype=torch.long), normalize_std)
        assert actual.dtype == dtype
        assert actual.tolist() == pytest.approx(case[field], abs=tolerance)
