"""The loss on hand-computed tokens, on input that must be ignored, and on input that must be refused."""

import math
from dataclasses import fields, replace
from typing import Any, Literal

import pytest
import torch

from megatron_dppo.algorithms import PRESETS, PolicyLossInputs, TopKLogProbs, policy_loss, preset
from megatron_dppo.errors import ConfigError

NAN, INF = math.nan, math.inf
EVERY_PRESET = pytest.mark.parametrize("name", PRESETS)


def gradient(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    assert tensor.grad is not None
    return tensor.grad


def make_topk(dtype: torch.dtype = torch.float64) -> TopKLogProbs:
    return TopKLogProbs(
        ids=torch.tensor([[4, 5], [6, 4], [4, -1]]),
        rollout_log_probs=torch.tensor([[0.5, 0.2], [0.6, 0.1], [0.8, NAN]], dtype=dtype).log(),
        log_probs=torch.tensor([[0.75, 0.1], [0.7, 0.1], [0.8, NAN]], dtype=dtype).log(),
    )


def make_inputs(dtype: torch.dtype = torch.float64, **changes) -> PolicyLossInputs:
    """Three tokens of probabilities mu .5, .2, .8 and pi .75, .1, .8, with A 1, -1, .5."""
    log = {
        "pi": torch.tensor([0.75, 0.1, 0.8], dtype=dtype).log(),
        "mu": torch.tensor([0.5, 0.2, 0.8], dtype=dtype).log(),
    }
    inputs = PolicyLossInputs(
        log_probs=log["pi"].requires_grad_(),
        rollout_log_probs=log["mu"],
        advantages=torch.tensor([1.0, -1.0, 0.5], dtype=dtype),
        old_log_probs=log["mu"].clone(),
        topk=make_topk(dtype),
        targets=torch.tensor([4, 5, 4]),
        response_lengths=torch.tensor([2, 1]),
    )
    return replace(inputs, **changes)


def test_hand_computed():
    inputs = make_inputs(token_weights=torch.tensor([2.0, 3.0, 0.0]))
    out = policy_loss(preset("grpo", eps_high=0.6), inputs)
    out.loss_sum.backward()
    assert out.ratio.tolist() == pytest.approx([1.5, 0.5, 1.0])
    assert out.divergence.tolist() == pytest.approx([0.25, 0.1, 0.0])
    assert out.mask.tolist() == [True, False, True]
    assert out.coefficient.tolist() == pytest.approx([1.5, 0.0, 0.5])
    assert out.loss_sum.item() == pytest.approx(-2 * 1.5 * math.log(0.75))
    assert gradient(inputs.log_probs).tolist() == pytest.approx([-3.0, 0.0, 0.0])


def test_cap_keeps_the_gradient_above_it():
    inputs = make_inputs()
    out = policy_loss(preset("cispo", ratio_cap=1.25), inputs)
    out.loss_sum.backward()
    assert out.ratio[0].item() == pytest.approx(1.5)
    assert gradient(inputs.log_probs).tolist() == pytest.approx([-1.25, 0.5, -0.5])
    assert out.metrics["num_ratio_capped"] == 1


def test_sampled_token_joins_the_topk():
    # Row 1 samples id 5, which is not in the Top-2 {6, 4}; row 2 has one column.
    without = {"delta": 1.0}
    union = policy_loss(preset("dppo_topk_tv", **without), make_inputs()).divergence
    assert union.tolist() == pytest.approx([0.25, 0.1, 0.0])
    literal = policy_loss(preset("dppo_topk_tv", include_other=False, **without), make_inputs()).divergence
    assert literal.tolist() == pytest.approx([0.175, 0.1, 0.0])
    # {6, 5, other}: the last of the two, id 4, gave way.
    replaced = preset("dppo_topk_tv", include_other=False, sampled_token="replace", **without)
    assert policy_loss(replaced, make_inputs()).divergence.tolist() == pytest.approx([0.175, 0.1, 0.0])
    one = preset("dppo_topk_tv", include_other=False, sampled_token="replace", top_k=1, **without)
    assert policy_loss(one, make_inputs()).divergence.tolist() == pytest.approx([0.125, 0.05, 0.0])


def test_each_sign_has_its_own_threshold():
    inputs = make_inputs(advantages=torch.tensor([1.0, -1.0, 0.0]))
    for name, low, high in (("dppo_binary_tv", 0.05, 0.2), ("grpo", 0.4, 0.4)):
        prefix = "delta" if name.startswith("dppo") else "eps"
        for sides, expected in (({"low": low}, [True, False, True]), ({"high": high}, [False, True, True])):
            both_loose = {f"{prefix}_low": 0.6, f"{prefix}_high": 0.6}
            objective = preset(
                name, **both_loose | {f"{prefix}_{side}": value for side, value in sides.items()}
            )
            assert policy_loss(objective, inputs).mask.tolist() == expected


def test_relaxing_looks_at_the_rollout_policy_whatever_the_anchor():
    rollout, old = torch.tensor([0.05, 0.5]).log(), torch.tensor([0.5, 0.05]).log()
    inputs = PolicyLossInputs(torch.tensor([0.9, 0.9]).log(), rollout, torch.ones(2), old_log_probs=old)
    out = policy_loss(preset("relax_high", anchor="recomputed"), inputs)
    assert out.mask.tolist() == [True, False]


def test_an_update_is_bad_from_a_drop_of_one_half_on():
    """Only of a token with A < 0, from .9 to .41 and .39."""
    rollout = torch.full((3,), 0.9).log()
    inputs = PolicyLossInputs(
        torch.tensor([0.41, 0.39, 0.39]).log(), rollout, torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3).bool()
    )
    for name, num_kept in (("pg_is", 1), ("dppo_binary_tv", 0)):
        metrics = policy_loss(preset(name), inputs).metrics
        assert (metrics["num_bad_updates"], metrics["num_bad_updates_kept"]) == (1, num_kept)


def test_a_ratio_at_the_cap_is_not_capped():
    inputs = make_inputs(log_probs=make_inputs().rollout_log_probs)
    assert policy_loss(preset("cispo", ratio_cap=1), inputs).metrics["num_ratio_capped"] == 0


def test_metrics_add_up():
    inputs = make_inputs(
        log_probs=torch.tensor([0.75, 0.1, 0.8, 0.1, 0.5]).log(),
        rollout_log_probs=torch.tensor([0.5, 0.2, 0.8, 0.9, 0.5]).log(),
        advantages=torch.tensor([1.0, -1.0, 0.5, -1.0, 0.0]),
        loss_mask=torch.tensor([True, True, True, True, True]),
    )
    metrics = policy_loss(preset("dppo_binary_tv"), inputs).metrics
    values = {name: value.item() for name, value in metrics.items()}
    assert values == pytest.approx(
        {
            "num_loss_tokens": 5,
            "num_positive": 2,
            "num_negative": 2,
            "num_masked_positive": 1,
            "num_masked_negative": 1,
            "num_ratio_capped": 0,
            "num_bad_updates": 1,
            "num_bad_updates_kept": 0,
            "num_infinite_divergence": 0,
            "num_clamped_log_probs": 0,
            "sum_divergence": 0.25 + 0.1 + 0.8,
            "sum_abs_prob_diff": 0.25 + 0.1 + 0.8,
        }
    )
    halves = [
        policy_loss(
            preset("dppo_binary_tv"),
            PolicyLossInputs(inputs.log_probs[s], inputs.rollout_log_probs[s], inputs.advantages[s]),
        ).metrics
        for s in (slice(0, 2), slice(2, 5))
    ]
    for name, value in metrics.items():
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(halves[0][name].item() + halves[1][name].item())


@EVERY_PRESET
def test_ignored_rows_are_ignored(name: str):
    objective = preset(name, entropy_coef=0.1)
    clean = make_inputs(entropy=torch.ones(3, dtype=torch.float64, requires_grad=True))
    expected = policy_loss(objective, clean)
    expected.loss_sum.backward()
    for poison in (NAN, INF, -INF, 5.0):

        def poisoned(tensor, poison=poison):
            row = (
                torch.full_like(tensor[:1], poison)
                if tensor.is_floating_point()
                else torch.full_like(tensor[:1], -7)
            )
            return torch.cat([tensor.detach(), row])

        values = {f.name: getattr(clean, f.name) for f in fields(clean)}
        dirty = PolicyLossInputs(
            **{n: poisoned(t) for n, t in values.items() if isinstance(t, torch.Tensor) and len(t) == 3},
            response_lengths=torch.tensor([2, 2]),
            token_weights=torch.tensor([1.0, 1.0, 1.0, poison]),
            loss_mask=torch.tensor([True, True, True, False]),
            topk=TopKLogProbs(*(poisoned(getattr(make_topk(), f.name)) for f in fields(TopKLogProbs))),
        )
        dirty.log_probs.requires_grad_()
        assert dirty.entropy is not None
        dirty.entropy.requires_grad_()
        out = policy_loss(objective, dirty)
        out.loss_sum.backward()
        assert out.loss_sum.item() == expected.loss_sum.item()
        assert torch.equal(out.mask[:3], expected.mask)
        assert torch.equal(out.divergence[:3], expected.divergence)
        assert (out.mask[3].item(), out.divergence[3].item(), out.coefficient[3].item()) == (False, 0, 0)
        assert gradient(dirty.log_probs).tolist() == [*gradient(clean.log_probs).tolist(), 0]
        assert gradient(dirty.entropy).tolist() == [*gradient(clean.entropy).tolist(), 0]
        assert {n: v.item() for n, v in out.metrics.items()} == {
            n: v.item() for n, v in expected.metrics.items()
        }


@EVERY_PRESET
def test_nothing_to_learn(name: str):
    empty = make_inputs()
    values = {f.name: getattr(empty, f.name) for f in fields(empty)}
    sliced = {n: t[:0] for n, t in values.items() if isinstance(t, torch.Tensor)}
    topk = TopKLogProbs(*(getattr(make_topk(), f.name)[:0] for f in fields(TopKLogProbs)))
    for inputs in (PolicyLossInputs(**sliced, topk=topk), replace(empty, loss_mask=torch.zeros(3).bool())):
        out = policy_loss(preset(name), inputs)
        out.loss_sum.backward()
        assert out.loss_sum.item() == 0
        assert not out.mask.any()
        assert all(value.item() == 0 for value in out.metrics.values())
    assert gradient(empty.log_probs).tolist() == [0, 0, 0]


@EVERY_PRESET
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(name: str, dtype: torch.dtype):
    inputs = make_inputs(dtype)
    out = policy_loss(preset(name), inputs)
    out.loss_sum.backward()
    assert (
        out.loss_sum.dtype == out.ratio.dtype == out.divergence.dtype == out.coefficient.dtype == torch.float32
    )
    exact = (inputs.log_probs.detach().float() - inputs.rollout_log_probs.float()).exp()
    torch.testing.assert_close(out.ratio, exact)
    assert gradient(inputs.log_probs).dtype == dtype


def test_overflowing_ratio_of_a_masked_token():
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = PolicyLossInputs(log_probs, torch.tensor([-120.0, -120.0]), torch.tensor([1.0, 0.0]))
    out = policy_loss(preset("grpo"), inputs)
    out.loss_sum.backward()
    assert out.ratio.tolist() == [INF, INF]
    assert out.coefficient.tolist() == [0, 0]
    assert out.loss_sum.item() == 0
    assert gradient(log_probs).tolist() == [0, 0]
    capped = policy_loss(preset("cispo"), inputs)
    assert capped.coefficient.tolist() == [5, 0]
    weightless = policy_loss(preset("pg_is"), replace(inputs, token_weights=torch.zeros(2)))
    assert weightless.coefficient.tolist() == [INF, 0]
    assert weightless.loss_sum.item() == 0


@EVERY_PRESET
def test_sampled_token_of_no_probability_left(name: str):
    log_probs = torch.tensor([-INF, -INF, -INF], dtype=torch.float64, requires_grad=True)
    out = policy_loss(preset(name), make_inputs(log_probs=log_probs))
    out.loss_sum.backward()
    assert out.coefficient.tolist() == [0, 0, 0]
    if preset(name).log_ratio_coef != 0:  # whose (log pi/mu)^2 is infinite
        assert out.loss_sum.item() == INF
        return
    assert out.loss_sum.item() == 0
    assert gradient(log_probs).tolist() == [0, 0, 0]


def test_log_probs_above_zero_are_clamped_and_counted():
    log_probs = torch.tensor([1e-6, 0.5], requires_grad=True)
    inputs = PolicyLossInputs(log_probs, torch.tensor([0.0, -0.1]), torch.tensor([1.0, -1.0]))
    out = policy_loss(preset("dppo_binary_kl"), inputs)
    out.loss_sum.backward()
    assert gradient(log_probs).tolist() == pytest.approx([-1.0, math.exp(0.1)])
    assert out.divergence.tolist() == [0, INF]
    assert out.mask.all()
    assert out.metrics["num_clamped_log_probs"] == 1
    assert out.metrics["num_infinite_divergence"] == 1
    assert out.metrics["sum_divergence"] == 0
    barely, clearly = torch.tensor([7e-4, -1.0]), torch.tensor([1.4e-3, -1.0])
    for trained, rollout, expected in ((barely, barely, 0), (clearly, barely, 1), (barely, clearly, 1)):
        inputs = PolicyLossInputs(trained, rollout, torch.tensor([1.0, -1.0]))
        assert policy_loss(preset("dppo_binary_kl"), inputs).metrics["num_clamped_log_probs"] == expected


def test_nan_of_the_trained_policy_reaches_the_loss():
    inputs = make_inputs(log_probs=torch.tensor([NAN, -1.0, -1.0], requires_grad=True))
    assert policy_loss(preset("dppo_binary_tv"), inputs).loss_sum.isnan()


def test_entropy_bonus():
    entropy = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 0.0])
    inputs = make_inputs(entropy=entropy, token_weights=weights, loss_mask=torch.tensor([True, True, False]))
    with_bonus = policy_loss(preset("dppo_binary_tv", entropy_coef=0.1), inputs).loss_sum
    with_bonus.backward()
    without = policy_loss(preset("dppo_binary_tv"), inputs).loss_sum
    assert (with_bonus - without).item() == pytest.approx(-0.1 * (1 + 0.5 * 2))
    assert gradient(entropy).tolist() == pytest.approx([-0.1, -0.05, 0])


@pytest.mark.parametrize("kind", ["k3", "k1"])
@pytest.mark.parametrize("name", ["grpo", "dppo_binary_tv", "cispo", "gspo"])
def test_the_kl_from_the_reference_is_the_formula_by_autograd(name: str, kind: Literal["k3", "k1"]):
    """Of all learning tokens, masked ones too: k3 by its own gradient, k1 as a penalty of the advantage."""
    generator = torch.Generator().manual_seed(5)
    pi, mu, ref = (-3 * torch.rand(3, 40, generator=generator, dtype=torch.float64)).unbind()
    advantages, weights = torch.randn(2, 40, generator=generator, dtype=torch.float64).unbind()
    learns = torch.arange(40) % 7 != 0
    ref[~learns] = NAN
    base: dict[str, Any] = dict(
        rollout_log_probs=mu,
        advantages=advantages,
        loss_mask=learns,
        token_weights=weights.abs(),
        response_lengths=torch.tensor([15, 25]),
    )
    capped = preset(name, ratio_cap=1.5)
    inputs = PolicyLossInputs(pi.clone().requires_grad_(), ref_log_probs=ref, **base)
    out = policy_loss(replace(capped, ref_kl_coef=0.3, ref_kl=kind), inputs)
    out.loss_sum.backward()
    expected = PolicyLossInputs(pi.clone().requires_grad_(), **base)
    without = policy_loss(capped, expected)
    assert torch.equal(out.mask, without.mask) and bool((~out.mask[learns]).any() or name == "cispo")
    d = (ref - expected.log_probs)[learns]
    penalty = (pi - mu).exp().clamp(max=1.5)[learns] * -d.detach()
    terms = d.exp() - d - 1 if kind == "k3" else penalty * expected.log_probs[learns]
    (without.loss_sum + 0.3 * (terms * weights.abs()[learns]).sum()).backward()
    torch.testing.assert_close(gradient(inputs.log_probs), gradient(expected.log_probs), rtol=1e-12, atol=1e-14)
    value = terms if kind == "k3" else penalty
    added = (out.loss_sum - without.loss_sum).item()
    assert added == pytest.approx(0.3 * (value * weights.abs()[learns]).sum().item(), rel=1e-12)


def test_mean_gradients_of_k3_and_k1_are_those_of_the_two_kl_divergences():
    """At pi = mu, over the vocabulary: k3 descends KL(ref || pi), k1 descends KL(pi || ref)."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    pi = logits.log_softmax(0)
    kls = {"k3": (ref.exp() * (ref - pi)).sum(), "k1": (pi.exp() * (pi - ref)).sum()}
    for kind, kl in kls.items():
        inputs = PolicyLossInputs(
            pi, pi.detach(), torch.zeros(9), token_weights=pi.detach().exp(), ref_log_probs=ref
        )
        loss = policy_loss(preset("grpo", ref_kl_coef=1.0, ref_kl=kind), inputs).loss_sum
        assert loss.item() == pytest.approx(kls["k1"].item())  # either estimates KL(pi || ref)
        found, expected = (torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (loss, kl))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["k3", "k1"])
def test_a_token_that_the_policy_gave_up_keeps_loss_and_gradient_finite(kind: Literal["k3", "k1"]):
    log_probs = torch.tensor([-200.0, -INF, -1.0], requires_grad=True)
    inputs = make_inputs(torch.float32, log_probs=log_probs, ref_log_probs=torch.tensor([-1.0, -1.0, -1.0]))
    out = policy_loss(preset("pg_is", ref_kl_coef=1.0, ref_kl=kind), inputs)
    out.loss_sum.backward()
    assert out.loss_sum.isfinite() and gradient(log_probs).square().isfinite().all()
    assert (gradient(log_probs)[0] < -1e8) == (kind == "k3")  # k1 is weighed by pi/mu, which is 0


def test_repeated_ids_beyond_the_used_columns_and_padding_pass():
    log_probs = torch.zeros(3, 4, dtype=torch.float64).sub(3)
    topk = TopKLogProbs(torch.tensor([[4, 5, 5, 4], [6, -1, -1, 6], [-1, -1, 4, 4]]), log_probs, log_probs)
    policy_loss(preset("dppo_topk_tv", top_k=2), make_inputs(topk=topk))


def topk(ids=None, rollout_log_probs=None, log_probs=None) -> TopKLogProbs:
    base = make_topk()
    return TopKLogProbs(
        base.ids if ids is None else torch.tensor(ids),
        base.rollout_log_probs if rollout_log_probs is None else torch.tensor(rollout_log_probs),
        base.log_probs if log_probs is None else torch.tensor(log_probs),
    )


REFUSED = {
    "no topk": ("dppo_topk_tv", {"topk": None}, "topk"),
    "no targets": ("dppo_topk_kl", {"targets": None}, "targets"),
    "no reference": ("grpo_k3", {}, "ref_log_probs of grpo: found none"),
    "reference nan": ("grpo_k3", {"ref_log_probs": torch.tensor([-1.0, NAN, -1.0])}, "nan at position 1 "),
    "reference -inf": ("grpo_k3", {"ref_log_probs": torch.tensor([-1.0, -1.0, -INF])}, "ref_log_probs"),
    "short reference": ("grpo_k3", {"ref_log_probs": torch.zeros(2)}, r"shape \[2\]"),
    "no old": ("minirl", {"old_log_probs": None}, "old_log_probs"),
    "rollout -inf": (
        "pg_is",
        {"rollout_log_probs": torch.tensor([-INF, -1.0, -1.0])},
        "-inf at position 0 ",
    ),
    "rollout nan": ("pg_is", {"rollout_log_probs": torch.tensor([-1.0, NAN, -1.0])}, "nan at position 1 "),
    "old nan": ("minirl", {"old_log_probs": torch.tensor([-1.0, NAN, -1.0])}, "old_log_probs"),
    "advantage nan": ("pg_is", {"advantages": torch.tensor([0.0, 0.0, NAN])}, "advantages"),
    "negative weight": ("pg_is", {"token_weights": torch.tensor([1.0, -1.0, 1.0])}, "token_weights"),
    "repeated id": ("dppo_topk_tv", {"topk": topk(ids=[[4, 5], [6, 6], [4, -1]])}, "distinct"),
    "topk mu nan": ("dppo_topk_kl", {"topk": topk(rollout_log_probs=[[-1.0, NAN], [-1, -2], [-1, -2]])}, "NaN"),
    "topk pi nan": ("dppo_topk_kl", {"topk": topk(log_probs=[[-1.0, NAN], [-1, -2], [-1, -2]])}, "NaN"),
    "negative target": ("dppo_topk_tv", {"targets": torch.tensor([4, -100, 4])}, "targets"),
    "short rollout": ("pg_is", {"rollout_log_probs": torch.zeros(2)}, r"shape \[2\]"),
    "2d log_probs": ("pg_is", {"log_probs": torch.zeros(3, 1)}, r"shape \[3, 1\]"),
    "short topk": ("dppo_topk_tv", {"topk": topk(ids=[[4, 5]])}, r"shape \[1, 2\]"),
    "ragged topk": ("dppo_topk_tv", {"topk": topk(log_probs=[[-1.0]] * 3)}, r"shape \[3, 1\]"),
    "flat topk": ("dppo_topk_tv", {"topk": topk(ids=[4, 5, 6])}, r"shape \[3\]"),
    "empty topk": ("dppo_topk_tv", {"topk": topk([[]] * 3, [[]] * 3, [[]] * 3)}, "columns"),
    "float mask": ("pg_is", {"loss_mask": torch.ones(3)}, "torch.float32"),
    "float ids": ("dppo_topk_tv", {"targets": torch.ones(3)}, "integer"),
    "no lengths": ("gspo", {"response_lengths": None}, "response_lengths of gspo: found none"),
    "long lengths": (
        "cppo",
        {"response_lengths": torch.tensor([2, 2])},
        r"of cppo: found 2, 2 \(sum 4\).*sum to 3",
    ),
    "negative length": (
        "trm",
        {"response_lengths": torch.tensor([4, -1])},
        r"response_lengths of trm: found 4, -1",
    ),
    "float lengths": ("mis", {"response_lengths": torch.tensor([2.0, 1.0])}, "float32; expected .B. integers"),
    "bool lengths": ("mis", {"response_lengths": torch.ones(3).bool()}, "response_lengths.*torch.bool"),
    "2d lengths": (
        "mis",
        {"response_lengths": torch.tensor([[2, 1]])},
        r"response_lengths of mis: found shape \[1, 2",
    ),
    "integer log_probs": ("pg_is", {"log_probs": torch.zeros(3, dtype=torch.long)}, "floating"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str):
    name, changes, message = REFUSED[case]
    objective = preset("grpo", ref_kl_coef=0.04) if name == "grpo_k3" else preset(name)
    with pytest.raises(ConfigError, match=message):
        policy_loss(objective, make_inputs(**changes))


def test_entropy_coef_without_entropy_is_refused():
    with pytest.raises(ConfigError, match="entropy"):
        policy_loss(preset("pg_is", entropy_coef=0.01), make_inputs())


def test_inputs_that_the_objective_does_not_read_may_be_absent():
    inputs = make_inputs(
        old_log_probs=None, topk=None, targets=torch.zeros(7), response_lengths=torch.tensor([-1])
    )
    policy_loss(preset("dppo_binary_tv"), inputs)


@pytest.mark.parametrize("name", PRESETS)
def test_a_token_without_advantage_is_never_dropped(name: str) -> None:
    torch.manual_seed(0)
    mu = torch.randn(6, 40).mul(3).log_softmax(1)
    pi = (mu + 2 * torch.randn(6, 40)).log_softmax(1)
    targets = torch.multinomial(mu.exp(), 1)
    ids = mu.topk(20).indices
    inputs = PolicyLossInputs(
        pi.gather(1, targets)[:, 0],
        mu.gather(1, targets)[:, 0],
        torch.zeros(6),
        old_log_probs=pi.gather(1, targets)[:, 0],
        topk=TopKLogProbs(ids, mu.gather(1, ids), pi.gather(1, ids)),
        targets=targets[:, 0],
        response_lengths=torch.tensor([2, 4]),
    )
    out = policy_loss(PRESETS[name], inputs)
    assert out.mask.all() and not out.coefficient.any()
