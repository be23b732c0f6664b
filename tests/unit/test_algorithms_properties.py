"""Theorems and identities that every mask, divergence and gradient must satisfy, on random distributions."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_dppo.algorithms import (
    DIVERGENCES,
    PRESETS,
    RULES,
    PolicyLossInputs,
    PolicyLossOutput,
    TopKLogProbs,
    TrustRegionTokens,
    binary_kl,
    binary_tv,
    policy_loss,
    preset,
    topk_kl,
    topk_partition,
    topk_tv,
)

ROUNDOFF = 1e-12
NUM_TOKENS = 48
RESPONSE_LENGTHS = torch.tensor([19, 0, 1, 28])
FEW = settings(max_examples=15, deadline=None)
EVERY_PRESET = pytest.mark.parametrize("name", PRESETS)
ONE_SIDED = ("none", "ratio", "divergence", "negative", "prefix")  # drop no update towards the anchor
EVERY_ONE_SIDED_PRESET = pytest.mark.parametrize("name", [n for n, o in PRESETS.items() if o.rule in ONE_SIDED])
TOPK_FUNCTIONS = pytest.mark.parametrize("function", [topk_tv, topk_kl])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Policies:
    """Rollout, recomputed and current policy over a small vocabulary, with sampled tokens and advantages."""

    def __init__(
        self, seed: int, vocab_size: int, scale: float, distance: float, dtype: torch.dtype = torch.float64
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_TOKENS, vocab_size)

        def normal(size: tuple[int, ...] = shape) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        logits_mu = scale * normal()
        logits_old = logits_mu + distance / 2 * normal()
        self.logits = (logits_old + distance / 2 * normal()).to(dtype).requires_grad_()
        self.mu, self.old = (torch.log_softmax(logits.to(dtype), -1) for logits in (logits_mu, logits_old))
        # Half of the tokens uniformly: improbable ones matter.
        from_mu = torch.multinomial(self.mu.exp(), 1, generator=generator)[:, 0]
        uniform = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)
        self.targets = torch.where(torch.arange(NUM_TOKENS) % 2 == 0, from_mu, uniform)
        self.advantages = normal((NUM_TOKENS,)).to(dtype)
        self.advantages[::8] = 0

    @property
    def pi(self) -> Tensor:
        return torch.log_softmax(self.logits, -1)

    def sampled(self, log_probs: Tensor) -> Tensor:
        return log_probs.gather(1, self.targets[:, None])[:, 0]

    def topk(self, k: int) -> TopKLogProbs:
        mu, ids = self.mu.topk(min(k, self.mu.shape[1]), dim=1)
        return TopKLogProbs(ids, mu, self.pi.detach().gather(1, ids))

    def partition(self, k: int, **options) -> tuple[Tensor, Tensor]:
        pi, mu = self.sampled(self.pi.detach()), self.sampled(self.mu)
        return topk_partition(self.topk(k), self.targets, pi, mu, top_k=k, **options)

    def inputs(self, k: int = 20, **changes) -> PolicyLossInputs:
        inputs = PolicyLossInputs(
            log_probs=self.sampled(self.pi),
            rollout_log_probs=self.sampled(self.mu),
            advantages=self.advantages,
            old_log_probs=self.sampled(self.old),
            topk=self.topk(k),
            targets=self.targets,
            response_lengths=RESPONSE_LENGTHS,
        )
        return replace(inputs, **changes)

    def run(self, name: str, **overrides) -> PolicyLossOutput:
        return policy_loss(preset(name, **overrides), self.inputs())


policies = st.builds(
    Policies,
    seed=st.integers(0, 2**31),
    vocab_size=st.integers(2, 24),
    scale=st.sampled_from([0.3, 2.0, 6.0]),
    distance=st.sampled_from([0.01, 0.3, 1.5]),
)
ks = st.integers(1, 30)


def test_every_registered_divergence_and_rule_has_a_preset():
    assert {p.divergence for p in PRESETS.values()} == set(DIVERGENCES)
    assert {p.rule for p in PRESETS.values()} == set(RULES) - {"own"}


# Divergences


@FEW
@given(policies, ks)
def test_coarser_partitions_are_closer(p: Policies, k: int):
    pi, mu = p.pi.detach(), p.mu
    a, b = p.sampled(pi), p.sampled(mu)
    for binary, topk in ((binary_tv, topk_tv), (binary_kl, topk_kl)):
        chain = [
            binary(a, b),
            topk(*p.partition(k, sampled_token="replace")),
            topk(*p.partition(k)),
            topk(*p.partition(k + 1)),
            topk(pi, mu),
        ]
        for coarse, fine in pairwise(chain):
            assert (coarse <= fine + ROUNDOFF).all()


@FEW
@given(policies, ks)
@TOPK_FUNCTIONS
def test_whole_vocabulary_is_exact(function, p: Policies, k: int):
    vocab_size = p.mu.shape[1]
    exact = function(p.pi.detach(), p.mu)
    for sampled_token in ("union", "replace"):
        actual = function(*p.partition(vocab_size + k, sampled_token=sampled_token))
        torch.testing.assert_close(actual, exact, rtol=ROUNDOFF, atol=ROUNDOFF)


@FEW
@given(policies)
@TOPK_FUNCTIONS
def test_one_outcome_besides_other_is_binary(function, p: Policies):
    binary = {topk_tv: binary_tv, topk_kl: binary_kl}[function]
    expected = binary(p.sampled(p.pi.detach()), p.sampled(p.mu))
    actual = function(*p.partition(1, sampled_token="replace"))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=ROUNDOFF)


@FEW
@given(policies, ks)
@pytest.mark.parametrize("name", ["dppo_topk_tv", "dppo_topk_kl"])
def test_order_of_ids_is_irrelevant(name: str, p: Policies, k: int):
    topk = p.topk(k)
    order = torch.randperm(topk.ids.shape[1], generator=torch.Generator().manual_seed(k))
    shuffled = TopKLogProbs(*(t[:, order] for t in (topk.ids, topk.rollout_log_probs, topk.log_probs)))
    outs = [policy_loss(preset(name, top_k=k), p.inputs(topk=columns)) for columns in (topk, shuffled)]
    torch.testing.assert_close(outs[0].divergence, outs[1].divergence, rtol=1e-9, atol=ROUNDOFF)


@FEW
@given(policies, ks)
def test_pinsker_and_bounds(p: Policies, k: int):
    a, b = p.sampled(p.pi.detach()), p.sampled(p.mu)
    pairs = [(binary_tv(a, b), binary_kl(a, b))]
    pairs += [
        (topk_tv(*cells), topk_kl(*cells))
        for cells in (p.partition(k), p.partition(k, sampled_token="replace"))
    ]
    for tv, kl in pairs:
        assert (tv.square() <= kl / 2 + ROUNDOFF).all()
        assert ((tv >= 0) & (tv <= 1 + ROUNDOFF) & (kl >= 0)).all()
        assert ((tv > 1e-6) <= (kl > 0)).all()


@FEW
@given(policies, ks)
def test_without_other_is_between_half_and_all(p: Policies, k: int):
    with_other = topk_tv(*p.partition(k))
    without = topk_tv(*p.partition(k, include_other=False))
    assert ((without >= with_other / 2 - ROUNDOFF) & (without <= with_other + ROUNDOFF)).all()


def test_without_other_at_one_argmax_is_half_the_binary_tv():
    mu, pi = torch.tensor([[0.7, 0.3]]).log(), torch.tensor([[0.5, 0.5]]).log()
    topk = TopKLogProbs(torch.tensor([[0]]), mu[:, :1], pi[:, :1])
    cells = topk_partition(topk, torch.tensor([0]), pi[:, 0], mu[:, 0], top_k=1, include_other=False)
    assert topk_tv(*cells).item() == pytest.approx(0.1)


@FEW
@given(policies)
def test_binary_tv_is_symmetric_and_kl_is_not(p: Policies):
    a, b = p.sampled(p.pi.detach()), p.sampled(p.mu)
    assert torch.equal(binary_tv(a, b), binary_tv(b, a))
    assert not torch.allclose(binary_kl(a, b), binary_kl(b, a), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_is_zero_only_where_policies_agree(name: str):
    divergence = DIVERGENCES[name]
    mu = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]], dtype=torch.float64).log()
    pi = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], dtype=torch.float64).log()
    one, two = (mu[:, 0], pi[:, 0]) if divergence.over == "sampled" else (mu, pi)
    value = divergence.function(two, one)
    assert value.shape == (2,)
    assert abs(value[0]) <= ROUNDOFF
    assert value[1] > 0.001


# Float32: a covered vocabulary and unresolved tails


@FEW
@given(st.integers(0, 2**31), st.sampled_from([3, 20, 64]), st.sampled_from([0.3, 3.0, 12.0]))
def test_float32_noise_of_a_covered_vocabulary_is_no_divergence(seed: int, vocab_size: int, scale: float):
    p = Policies(seed, vocab_size, scale, 0.3, torch.float32)
    for function, tolerance in ((topk_tv, 2e-6), (topk_kl, 5e-6)):
        actual = function(*p.partition(vocab_size))
        exact = function(p.pi.detach().double(), p.mu.double())
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=tolerance)


def kl_of_tails(rollout_tail: float, tail: float, dtype: torch.dtype) -> float:
    """KL of three tokens; one is outside the Top-2, whose two tokens have equal probabilities."""
    mu, pi = (
        torch.tensor([[(1 - t) / 2, (1 - t) / 2]], dtype=torch.float64).log() for t in (rollout_tail, tail)
    )
    topk = TopKLogProbs(torch.tensor([[0, 1]]), mu.to(dtype), pi.to(dtype))
    cells = topk_partition(topk, torch.tensor([0]), topk.log_probs[:, 0], topk.rollout_log_probs[:, 0], top_k=2)
    return topk_kl(*cells).item()


def test_tail_of_the_policy_below_roundoff():
    for dtype in (torch.float32, torch.float64):
        assert kl_of_tails(0.1, 0.0, dtype) == math.inf
        assert kl_of_tails(0.0, 0.0, dtype) == 0
        assert kl_of_tails(0.0, 0.1, dtype) == pytest.approx(-math.log(0.9), rel=1e-5)
    # Float32 cannot see the tail of 1e-7: not infinite, and a lower bound of the true KL.
    true_kl = 1e-3 * math.log(1e-3 / 1e-7) + (1 - 1e-3) * math.log(1 - 1e-3)
    assert kl_of_tails(1e-3, 1e-7, torch.float64) == pytest.approx(true_kl, rel=1e-4)
    assert 0.4 * true_kl < kl_of_tails(1e-3, 1e-7, torch.float32) < true_kl
    assert kl_of_tails(1e-5, 0.0, torch.float32) < 1e-4


def test_near_certain_tokens_keep_their_precision():
    mu, pi = torch.tensor([-1e-9], dtype=torch.float64), torch.tensor([-1e-3], dtype=torch.float64)
    exact = math.exp(-1e-9) * (1e-3 - 1e-9) + 1e-9 * math.log(1e-9 / -math.expm1(-1e-3))
    assert binary_kl(pi, mu).item() == pytest.approx(exact, rel=1e-9)
    topk = TopKLogProbs(
        torch.tensor([[0, 1]]),
        torch.tensor([[-1e-12, math.log(0.4e-12)]], dtype=torch.float64),
        torch.full((1, 2), -1.0, dtype=torch.float64),
    )
    _, rollout = topk_partition(topk, torch.tensor([0]), pi, topk.rollout_log_probs[:, 0], top_k=2)
    assert rollout[0, -1].exp().item() == pytest.approx(0.6e-12, rel=1e-6, abs=0)


def test_roundoff_makes_no_negative_kl():
    p = Policies(0, 20, 2.0, 1e-6, torch.float32)
    pi, mu = p.sampled(p.pi.detach()), p.sampled(p.mu)
    for kl in (binary_kl(pi, mu), topk_kl(p.pi.detach(), p.mu), topk_kl(*p.partition(5))):
        assert ((kl >= 0) & (kl < 1e-6)).all()


def test_partition_ignores_the_values_of_padding():
    topk = TopKLogProbs(
        torch.tensor([[3, -1]]), torch.tensor([[0.5, 0.4]]).log(), torch.tensor([[0.3, 0.2]]).log()
    )
    sampled = torch.tensor([0.1]).log()
    policy, rollout = topk_partition(topk, torch.tensor([7]), sampled, sampled, top_k=2)
    assert sorted(policy[0].exp().tolist()) == pytest.approx([0, 0.1, 0.3, 0.6])
    assert sorted(rollout[0].exp().tolist()) == pytest.approx([0, 0.1, 0.4, 0.5])
    assert topk_tv(policy, rollout).item() == pytest.approx(0.2)


# Masks


@FEW
@given(policies)
@EVERY_ONE_SIDED_PRESET
def test_masks_drop_only_what_moves_away(name: str, p: Policies):
    objective = preset(name)
    out = policy_loss(objective, p.inputs())
    anchor = p.old if objective.anchor == "recomputed" else p.mu
    moved = (p.sampled(p.pi) - p.sampled(anchor)).sign() * p.advantages.sign()
    assert (moved[~out.mask] > 0).all()
    assert out.mask[p.advantages == 0].all()


@FEW
@given(policies)
@EVERY_PRESET
def test_weights_see_only_the_sign_of_the_advantage(name: str, p: Policies):
    scaled = policy_loss(preset(name), p.inputs(advantages=p.advantages * 1e-3)).weight
    assert torch.equal(p.run(name).weight, scaled)


@FEW
@given(policies)
@EVERY_ONE_SIDED_PRESET
def test_a_token_that_moves_away_moves_back_with_the_other_sign(name: str, p: Policies):
    flipped = policy_loss(preset(name), p.inputs(advantages=-p.advantages)).mask
    assert (p.run(name).mask | flipped).all()


@EVERY_PRESET
def test_equal_policies_keep_everything(name: str):
    p = Policies(0, 9, 2.0, 0.3)
    inputs = p.inputs(rollout_log_probs=p.sampled(p.pi), old_log_probs=p.sampled(p.pi))
    topk = p.topk(5)
    inputs = replace(inputs, topk=TopKLogProbs(topk.ids, topk.log_probs, topk.log_probs))
    out = policy_loss(preset(name), inputs)
    assert (out.weight == 1).all()
    assert (out.divergence == 0).all()
    assert (out.ratio == 1).all()
    assert torch.equal(out.coefficient, p.advantages)


@FEW
@given(policies, st.floats(0, 1), st.floats(0, 1))
@pytest.mark.parametrize("name", [n for n, o in PRESETS.items() if "delta" in o.fields_in_use])
def test_masks_are_monotone_in_delta(name: str, p: Policies, one: float, two: float):
    tight, loose = (p.run(name, delta=delta + 1e-9).mask for delta in sorted((one, two)))
    assert (tight <= loose).all()


@FEW
@given(policies)
def test_ends_of_delta(p: Policies):
    assert p.run("dppo_binary_tv", delta=1).mask.all()
    assert p.run("dppo_topk_tv", delta=1 + ROUNDOFF).mask.all()
    moves_away = (p.sampled(p.pi) - p.sampled(p.mu)) * p.advantages > 0
    assert torch.equal(p.run("dppo_binary_tv", delta=0).mask, ~moves_away)


@FEW
@given(policies, st.sampled_from([0.02, 0.15, 0.4]))
def test_figure_1_is_equation_12_for_binary_tv(p: Policies, delta: float):
    moved = p.sampled(p.pi).exp() - p.sampled(p.mu).exp()
    figure_1 = p.advantages.sign() * moved <= delta
    assert torch.equal(p.run("dppo_binary_tv", delta=delta).mask, figure_1)


@FEW
@given(policies)
def test_presets_that_coincide(p: Policies):
    def same(name: str, other: str, inputs: PolicyLossInputs | None = None, **overrides) -> None:
        inputs = inputs or p.inputs()
        one, two = policy_loss(preset(name, **overrides), inputs), policy_loss(preset(other), inputs)
        assert torch.equal(one.mask, two.mask), (name, other)
        assert torch.equal(one.coefficient, two.coefficient)

    old_is_mu = p.inputs(old_log_probs=p.sampled(p.mu))
    same("minirl", "grpo_clip_higher", old_is_mu)
    same("dppo_binary_tv_decoupled", "dppo_binary_tv", old_is_mu)
    same("dppo_binary_kl_decoupled", "dppo_binary_kl", old_is_mu)
    same("negative_mask_recomputed", "negative_mask", old_is_mu)
    same("dppo_binary_tv", "dppo_binary_tv_decoupled", anchor="recomputed")
    for relaxed in ("relax_high", "relax_low", "relax_both"):
        same(relaxed, "grpo_clip_higher", alpha=0)
    same("relax_both", "pg_is", alpha=1.1)
    same("cispo", "pg_tis", ratio_cap=3)


@FEW
@given(policies)
def test_relaxing_one_side_frees_only_that_side(p: Policies):
    clipped = p.run("grpo_clip_higher").mask
    high, low = p.run("relax_high", alpha=1.1).mask, p.run("relax_low", alpha=1.1).mask
    positive, negative = p.advantages > 0, p.advantages < 0
    assert high[positive].all()
    assert low[negative].all()
    assert torch.equal(high[negative], clipped[negative])
    assert torch.equal(low[positive], clipped[positive])


def test_direction_survives_where_probabilities_round_to_one():
    mu, pi = torch.tensor([-1e-9]), torch.tensor([-1e-12])
    assert mu.exp() == pi.exp() == 1
    for sign in (1.0, -1.0):
        one = torch.ones(1)
        tokens = TrustRegionTokens(pi, mu, mu, sign * one, divergence=one, loss_mask=one.bool())
        assert preset("dppo_binary_kl").weigh(tokens).item() == (sign < 0)


# Gradients


@FEW
@given(policies)
@EVERY_PRESET
def test_gradient_is_equation_23(name: str, p: Policies):
    """And 2 c log pi/mu of the term that `log_ratio_coef` c adds, for dropped tokens, too."""
    out = p.run(name)
    out.loss_sum.backward()
    grad = p.logits.grad
    assert grad is not None
    onehot = torch.nn.functional.one_hot(p.targets, p.mu.shape[1])
    added = 2 * preset(name).log_ratio_coef * out.ratio.log()
    expected = (added - out.coefficient)[:, None] * (onehot - p.pi.detach().exp())
    scale = 1 + out.coefficient.abs().max().item()
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12 * scale)
    assert (grad[~out.mask & (added == 0)] == 0).all()
    assert (grad.sum(1).abs() <= 1e-12 * scale).all()


@FEW
@given(policies)
@pytest.mark.parametrize(
    "name", [n for n, o in PRESETS.items() if o.ratio_cap == math.inf and o.importance == "token"]
)
def test_gradient_equals_the_surrogates(name: str, p: Policies):
    out = p.run(name)
    (grad,) = torch.autograd.grad(out.loss_sum, p.logits)
    ratio = (p.sampled(p.pi) - p.sampled(p.mu)).exp()
    surrogate = -(out.weight * ratio * p.advantages).sum()
    surrogate = surrogate + preset(name).log_ratio_coef * ratio.log().square().sum()
    (through_ratio,) = torch.autograd.grad(surrogate, p.logits)
    torch.testing.assert_close(grad, through_ratio, rtol=1e-9, atol=1e-12 * (1 + ratio.max().item()))


def test_only_the_loss_carries_gradient():
    p = Policies(1, 8, 2.0, 1.5)
    inputs = p.inputs(rollout_log_probs=p.sampled(p.mu).requires_grad_(), topk=p.topk(4))
    out = policy_loss(preset("dppo_topk_kl"), inputs)
    tensors = (out.mask, out.divergence, out.ratio, out.coefficient, *out.metrics.values())
    assert out.loss_sum.requires_grad
    assert not any(t.requires_grad for t in tensors)
    out.loss_sum.backward()
    assert inputs.rollout_log_probs.grad is None
