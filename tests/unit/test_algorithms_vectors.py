"""Every algorithm against exact values (mpmath, 60 digits) of tests/vectors/dppo_vectors.json."""

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
from tests.support.dppo_vectors import CASES, SETTINGS, VECTORS, assert_exact, build, log_softmax

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
    num_decided = 0
    for case in CASES:
        out, gradient = run_case(setting, case, dtype)
        assert {out.loss_sum.dtype, out.ratio.dtype, out.divergence.dtype, out.coefficient.dtype} == {dtype}
        assert out.mask.dtype == torch.bool
        found = {name: getattr(out, name).item() for name in ("ratio", "divergence", "coefficient")}
        found |= {"weight": out.mask.item(), "loss": out.loss_sum.item()}
        num_decided += assert_exact(setting, case, found, gradient.tolist(), dtype)
    assert num_decided > 0.9 * len(CASES)


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
