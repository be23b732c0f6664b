"""Divergences where float32 does not know how certain a policy is: 1 - pi below the roundoff of log pi."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithms import (
    PolicyLossInputs,
    TopKLogProbs,
    binary_kl,
    binary_tv,
    policy_loss,
    preset,
    topk_kl,
    topk_partition,
    topk_tv,
)
from tests.support.peaked_policies import ROUNDOFF, PeakedPolicies, assert_ordered_kls, assert_ordered_tvs

BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@given(
    p=st.builds(
        PeakedPolicies.draw,
        seed=st.integers(0, 2**31),
        vocab_size=st.one_of(st.integers(2, 40), st.sampled_from([300, 2000])),
        noise=st.sampled_from([0.0, 0.05, 0.2, 1.5, 5.0, 12.0]),
        peak=st.sampled_from([8.0, 17.0, 24.0, 60.0]),
    ),
    top_k=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_coarser_partitions_are_closer_in_float32(p: PeakedPolicies, top_k: int):
    policy, rollout = (p.sampled(x) for x in p.log_probs(torch.float32))
    topk = p.topk(top_k, torch.float32)
    tvs, kls = [binary_tv(policy, rollout)], [binary_kl(policy, rollout)]
    for sampled_token in ("replace", "union"):
        cells = topk_partition(topk, p.targets, policy, rollout, top_k=top_k, sampled_token=sampled_token)
        tvs.append(topk_tv(*cells))
        kls.append(topk_kl(*cells))
    assert {x.dtype for x in tvs + kls} == {torch.float32}
    assert_ordered_tvs(p, *tvs)
    assert_ordered_kls(p, top_k, *kls)


def exact_binary_kl(rollout_tail: float, tail: float) -> float:
    known = (1 - rollout_tail) * (math.log1p(-rollout_tail) - math.log1p(-tail))
    return known + rollout_tail * math.log(rollout_tail / tail)


def test_kl_is_finite_if_a_log_prob_rounds_to_0():
    exact = exact_binary_kl(1e-4, 3e-8)
    assert exact == pytest.approx(7.1e-4, rel=0.01)
    log_probs = torch.tensor([1e-4, 3e-8], dtype=torch.float64).neg().log1p()
    assert binary_kl(log_probs[1:], log_probs[:1]).item() == pytest.approx(exact, rel=1e-6)
    mu, pi = log_probs[:1].float(), torch.zeros(1)
    assert exact / 4 < binary_kl(pi, mu).item() < exact
    out = policy_loss(preset("dppo_binary_kl"), PolicyLossInputs(pi, mu, torch.ones(1)))
    assert out.mask.item()
    assert out.metrics["num_infinite_divergence"] == 0
    recomputed = PolicyLossInputs(pi, mu, torch.ones(1), old_log_probs=mu)
    assert policy_loss(preset("dppo_binary_kl_decoupled"), recomputed).mask.item()


@pytest.mark.parametrize(
    ("rollout_tail", "tail"),
    [(0.3, 0.1), (1e-3, 1e-5), (1e-5, 1e-3), (5e-6, 2e-5), (1e-9, 1e-3), (1 - 1e-6, 0.5)],
)
def test_resolved_tails_stay_accurate(rollout_tail: float, tail: float):
    exact = exact_binary_kl(rollout_tail, tail)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        mu, pi = (torch.tensor([t], dtype=torch.float64).neg().log1p().to(dtype) for t in (rollout_tail, tail))
        assert binary_kl(pi, mu).item() == pytest.approx(exact, rel=tolerance, abs=tolerance * 0.01)


@pytest.mark.parametrize(("num_epsilons", "is_zero"), [(24, True), (45, False)])
def test_a_tail_of_up_to_32_epsilons_counts_as_zero(num_epsilons: int, is_zero: bool):
    """Two columns with float32's largest sums below 1, of mu alone: pi has no tail at all."""
    tail = num_epsilons * torch.finfo(torch.float32).eps
    mu, pi = torch.tensor([[0.5, 0.5 - tail]]).log(), torch.tensor([[0.5, 0.5]]).log()
    topk, targets = TopKLogProbs(torch.tensor([[7, 3]]), mu, pi), torch.tensor([3])
    policy, rollout = topk_partition(topk, targets, pi[:, 1], mu[:, 1], top_k=2)
    assert (policy[0, -1].item() == -math.inf) is is_zero
    assert (rollout[0, -1].item() == -math.inf) is is_zero


@BOTH_DTYPES
def test_a_kl_is_infinite_only_where_the_rollout_s_tail_is_surely_positive(dtype: torch.dtype):
    surely, barely = torch.tensor([0.011, 0.009], dtype=torch.float64).neg().log1p().to(dtype)
    zero = torch.zeros(1, dtype=dtype)
    assert binary_kl(zero, surely[None]).item() == math.inf
    assert 0.01 < binary_kl(zero, barely[None]).item() < math.inf
    assert binary_kl(zero, zero).item() == 0
    assert binary_kl(barely[None], zero).item() == pytest.approx(-math.log1p(-0.009), rel=1e-5)


@BOTH_DTYPES
def test_no_log_probs_make_a_nan(dtype: torch.dtype):
    eps = torch.finfo(dtype).eps
    near_0 = [0.0, -1e-300, -1e-40, -eps / 4, -eps, -31 * eps, -33 * eps, -0.0099, -0.0102]
    values = torch.tensor([*near_0, -0.7, -20, -120, -1e30, -math.inf], dtype=dtype)
    pi, mu = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    ids = torch.zeros(len(pi), 1, dtype=torch.int64)
    kls = [binary_kl(pi, mu)]
    for other in values:
        column = torch.full_like(pi, float(other))[:, None]
        cells = topk_partition(TopKLogProbs(ids, column, column.flip(0)), ids[:, 0] + 1, pi, mu, top_k=1)
        kls.append(topk_kl(*cells))
    for kl in kls:
        assert kl.dtype == dtype
        assert (kl >= 0).all()


def test_a_top_k_kl_is_at_least_the_sampled_token_s():
    """The sampled token's tail is just above roundoff, and but a little of it outside the Top-K."""

    def log(masses: list[float]) -> Tensor:
        return torch.tensor([masses], dtype=torch.float64).log().float()

    tail = 33.5 / 32 * ROUNDOFF
    mu, pi = log([0.991, 0.0088]), log([1 - tail, tail - ROUNDOFF / 320])
    topk = TopKLogProbs(torch.tensor([[0, 1]]), mu, pi)
    cells = topk_partition(topk, torch.tensor([0]), pi[:, 0], mu[:, 0], top_k=2)
    policy, rollout = (x[0, 1:] for x in cells)  # of the sampled token, the other id and 'other'
    over_outcomes = float((rollout.exp() * (rollout - policy)).sum())
    binary = binary_kl(pi[:, 0], mu[:, 0])
    assert over_outcomes < binary.item() - 5e-4
    assert topk_kl(*cells).item() == binary.item() < exact_binary_kl(0.009, tail) + 1e-5


def test_as_many_tokens_are_masked_in_float32_as_in_float64():
    """10,000 tokens whose logits two engines compute with errors of .2; rows from flat to nearly certain."""
    generator = torch.Generator().manual_seed(0)
    shape = (10_000, 64)
    rollout_logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    peaks = torch.randint(64, (10_000, 1), generator=generator)
    heights = 28 * torch.rand(10_000, 1, generator=generator, dtype=torch.float64)
    rollout_logits.scatter_add_(1, peaks, heights)
    logits = rollout_logits + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(rollout_logits.softmax(1), 1, generator=generator)
    advantages = torch.randn(10_000, generator=generator).sign()

    def masked(dtype: torch.dtype) -> Tensor:
        pi, mu = (x.to(dtype).log_softmax(1).gather(1, targets)[:, 0] for x in (logits, rollout_logits))
        assert ((pi == 0).sum() > 300) == (dtype == torch.float32)
        out = policy_loss(preset("dppo_binary_kl"), PolicyLossInputs(pi, mu, advantages.to(dtype)))
        assert out.metrics["num_infinite_divergence"] == 0
        return ~out.mask

    assert torch.equal(masked(torch.float32), masked(torch.float64))
    assert 0 < int(masked(torch.float64).sum()) < 10
