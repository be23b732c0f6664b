"""Figures of `what-if` against plain loops in float64, and custom rules."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import PRESETS, PolicyLossInputs, preset
from megatron_dppo.algorithms.token_rules import Band
from megatron_dppo.analysis.what_if.answer import as_text
from megatron_dppo.analysis.what_if.measures import (
    PROB_EDGES,
    PolicyTokens,
    evaluate_variants,
    main_thresholds,
    mismatch_by_routes,
    scale_threshold,
)
from megatron_dppo.analysis.what_if.question import (
    Variant,
    parse_sweeps,
    require_own_rules,
    rollouts_of,
    variants,
)
from megatron_dppo.errors import ConfigError
from megatron_dppo.metrics.engine_comparison import Routes
from tests.support.refusals import refused
from tests.unit.test_what_if import of_two_rollouts, tokens

CLOSE = 1e-9


@dataclass(frozen=True)
class Token:
    """One token, its score's norm and its loss's weight, as Python numbers."""

    ratio: float
    pi: float
    mu: float
    advantage: float
    response_ratio: float
    norm: float
    loss_weight: float


def small_batch() -> tuple[PolicyTokens, list[Token]]:
    """120 tokens of three responses in float64, one of ten without an advantage."""
    inputs = tokens(120)
    weights = torch.rand(120, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    advantages = torch.where(torch.arange(120) % 10 == 0, 0.0, inputs.advantages).double()
    wide = PolicyLossInputs(
        log_probs=inputs.log_probs.double(),
        rollout_log_probs=inputs.rollout_log_probs.double(),
        advantages=advantages,
        token_weights=weights,
        response_lengths=torch.tensor([40, 50, 30]),
    )
    kept = of_two_rollouts(wide)
    log_ratios = [p - q for p, q in zip(wide.log_probs.tolist(), wide.rollout_log_probs.tolist(), strict=True)]
    means: list[float] = []
    for start, end in ((0, 40), (40, 90), (90, 120)):
        means += [math.exp(sum(log_ratios[start:end]) / (end - start))] * (end - start)
    rows = zip(
        log_ratios,
        wide.log_probs.tolist(),
        wide.rollout_log_probs.tolist(),
        advantages.tolist(),
        means,
        kept.score_norms.double().tolist(),
        weights.tolist(),
        strict=True,
    )
    found = [Token(math.exp(r), math.exp(p), math.exp(q), *others) for r, p, q, *others in rows]
    return kept, found


def weight_of(name: str, token: Token, delta: float) -> float:
    """M of a token by the rule's printed formula."""
    away = token.advantage * (token.ratio - 1) > 0
    if name == "grpo":
        above, below = token.ratio > 1 + delta, token.ratio < 1 - delta
        return float(not (above if token.advantage > 0 else below if token.advantage < 0 else False))
    distance = abs(token.pi - token.mu)
    if name == "dppo_binary_tv":
        return float(not (away and distance > delta))
    if name == "ipo":
        return float(not (token.advantage != 0 and distance > delta))
    if name == "drpo":
        sign = (away > 0) - (token.advantage * (token.ratio - 1) < 0)
        return 1 - sign * distance / delta
    assert name == "gspo"
    above, below = token.response_ratio > 1 + delta, token.response_ratio < 1 - delta
    return float(not (above if token.advantage > 0 else below if token.advantage < 0 else False))


def expected_figures(name: str, batch: list[Token], delta: float) -> dict[str, float]:
    """Shares, mass and the cosine with no mask, token by token."""
    acting = [t for t in batch if t.advantage != 0]
    kept = whole = product = own_square = other_square = 0.0
    for t in batch:
        weight, ratio = weight_of(name, t, delta), t.response_ratio if name == "gspo" else t.ratio
        kept += abs(weight) * ratio * abs(t.advantage)
        whole += ratio * abs(t.advantage)
        own = weight * ratio * t.advantage - (2e-3 * math.log(t.ratio) if name == "ipo" else 0.0)
        own, other = t.loss_weight * own, t.loss_weight * t.ratio * t.advantage
        product += own * other * t.norm**2
        own_square += (own * t.norm) ** 2
        other_square += (other * t.norm) ** 2
    return {
        "masked_fraction": sum(weight_of(name, t, delta) == 0 for t in acting) / len(acting),
        "gradient_mass_kept": kept / whole,
        "cosine_unmasked": product / math.sqrt(own_square * other_square),
    }


THRESHOLDS = {
    "grpo": (0.2, {}),
    "dppo_binary_tv": (0.15, {}),
    "ipo": (0.1, {"delta": 0.1, "log_ratio_coef": 1e-3}),
    "drpo": (0.5, {"delta": 0.5}),  # small: some weights are below 0
    "gspo": (0.05, {"eps_low": 0.05, "eps_high": 0.05}),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_figures_are_those_of_plain_loops(name: str) -> None:
    delta, fields = THRESHOLDS[name]
    kept, batch = small_batch()
    (row,), _ = evaluate_variants([Variant(name, fields)], {"live": kept})
    for figure, value in expected_figures(name, batch, delta).items():
        assert row[figure] == pytest.approx(value, rel=CLOSE), figure
    for sign, factor in (("positive", 1), ("negative", -1)):
        weights = [weight_of(name, t, delta) for t in batch if factor * t.advantage > 0]
        assert row[f"masked_fraction_{sign}"] == pytest.approx(sum(w == 0 for w in weights) / len(weights))
        assert row[f"weight_mean_{sign}"] == pytest.approx(sum(weights) / len(weights), rel=CLOSE)
    masked = [t.mu for t in batch if t.advantage != 0 and weight_of(name, t, delta) == 0]
    if masked:
        assert row["rollout_prob_masked"] == pytest.approx(sum(masked) / len(masked), rel=CLOSE)
    for each in row["by_prob"]:
        is_last = each["prob_high"] == PROB_EDGES[-1]
        inside = [
            weight_of(name, t, delta)
            for t in batch
            if (t.advantage > 0 if each["sign"] == "positive" else t.advantage < 0)
            and each["prob_low"] <= t.mu
            and (is_last or t.mu < each["prob_high"])
        ]
        assert each["num_tokens"] == len(inside)
        if inside:
            assert each["weight_mean"] == pytest.approx(sum(inside) / len(inside), rel=CLOSE)
            assert each["masked_fraction"] == sum(weight == 0 for weight in inside) / len(inside)
    assert sum(each["num_tokens"] for each in row["by_prob"]) == 108
    for each in row["sensitivity"]:
        value = expected_figures(name, batch, delta * each["factor"])["masked_fraction"]
        assert each["masked_fraction"] == pytest.approx(value), each
    assert [each["factor"] for each in row["sensitivity"]] == [0.5, 1.0, 2.0]
    for each, part in zip(row["by_rollout"], (batch[:60], batch[60:]), strict=True):
        of_part = expected_figures(name, part, delta)
        assert {**of_part, "rollout": each["rollout"]} == pytest.approx(each, rel=CLOSE)


def test_each_way_of_routing_has_its_own_figures() -> None:
    """The first half of the tokens with live routes, the second with replayed ones."""
    kept, batch = small_batch()
    of_routes: dict[Routes, PolicyTokens] = {
        "live": tokens_at(kept, slice(0, 40)),
        "replayed": tokens_at(kept, slice(40, 120)),
    }
    parts: dict[Routes, list[Token]] = {"live": batch[:40], "replayed": batch[40:]}
    asked = [Variant("dppo_binary_tv"), Variant("ipo", {"delta": 0.1})]
    rows, pairs = evaluate_variants(asked, of_routes)
    assert [(row["routes"], row["preset"]) for row in rows] == [
        (routes, variant.preset) for routes in ("live", "replayed") for variant in asked
    ]
    found = mismatch_by_routes(of_routes)
    for routes, part in parts.items():
        own, other = (row for row in rows if row["routes"] == routes)
        for row, delta in ((own, 0.15), (other, 0.1)):
            value = expected_figures(row["preset"], part, delta)["masked_fraction"]
            assert row["masked_fraction"] == pytest.approx(value)
        acting = [t for t in part if t.advantage != 0]
        pair = [weight_of("dppo_binary_tv", t, 0.15) == weight_of("ipo", t, 0.1) for t in acting]
        assert pairs[routes]["same_decision"][0][1] == pytest.approx(sum(pair) / len(pair))
        assert other["agreement"] == pytest.approx(sum(pair) / len(pair))
        tv = sum(abs(t.pi - t.mu) for t in part) / len(part)
        assert found[routes]["abs_prob_diff_mean"] == pytest.approx(tv, rel=1e-6)
        k1 = sum(math.log(t.mu) - math.log(t.pi) for t in part) / len(part)
        assert found[routes]["kl_k1"] == pytest.approx(k1, rel=1e-6)
        assert found[routes]["ratio_max"] == pytest.approx(max(t.ratio for t in part), rel=1e-6)
        assert found[routes]["ratio_min"] == pytest.approx(min(t.ratio for t in part), rel=1e-6)


def tokens_at(kept: PolicyTokens, places: slice) -> PolicyTokens:
    """Some of the tokens, without their responses."""
    inputs = kept.inputs
    some = PolicyLossInputs(
        log_probs=inputs.log_probs[places],
        rollout_log_probs=inputs.rollout_log_probs[places],
        advantages=inputs.advantages[places],
    )
    return PolicyTokens(some, kept.score_norms[places], kept.rollouts[places])


@pytest.mark.filterwarnings("error")
def test_tokens_without_an_advantage_are_no_share_of_anything() -> None:
    kept, _ = small_batch()
    still = replace(kept.inputs, advantages=torch.zeros_like(kept.inputs.advantages))
    asked = [Variant("dppo_binary_tv"), Variant("grpo")]
    rows, pairs = evaluate_variants(asked, {"live": replace(kept, inputs=still)})
    assert all(math.isnan(row[name]) for row in rows for name in ("masked_fraction", "agreement"))
    assert all(math.isnan(x) for table in pairs["live"].values() for values in table for x in values)


def test_agreement_is_counted_over_tokens_with_an_advantage() -> None:
    kept, batch = small_batch()
    names = ["grpo", "dppo_binary_tv", "pg_is"]
    rows, pairs = evaluate_variants([Variant(name) for name in names], {"live": kept})
    acting = [t for t in batch if t.advantage != 0]
    masks = [
        [weight_of(name, t, THRESHOLDS[name][0]) if name in THRESHOLDS else 1.0 for t in acting]
        for name in names
    ]
    same = pairs["live"]["same_decision"]
    for i, left in enumerate(masks):
        for j, right in enumerate(masks):
            assert same[i][j] == pytest.approx(sum(a == b for a, b in zip(left, right, strict=True)) / 108)
    assert [row["agreement"] for row in rows] == pytest.approx(same[0])
    correlation = torch.tensor(masks[:2], dtype=torch.float64).corrcoef()[0, 1]
    assert pairs["live"]["weight_correlation"][0][1] == pytest.approx(float(correlation))
    assert math.isnan(pairs["live"]["weight_correlation"][0][2]), "all weights of pg_is are 1"


def test_nothing_is_the_same_gradient_and_nothing_masked() -> None:
    kept, _ = small_batch()
    rows, _ = evaluate_variants([Variant("pg_is"), Variant("pg_tis"), Variant("cispo")], {"live": kept})
    for row in rows:  # each is held against no mask with its own cap
        assert row["cosine_unmasked"] == pytest.approx(1.0) and row["gradient_mass_kept"] == pytest.approx(1.0)
        assert row["cosine_dppo_topk_tv"] is None, "this batch has no Top-K"
        assert row["sensitivity"] == []
    topk, _ = evaluate_variants([Variant("dppo_topk_tv", {"top_k": 4})], {"live": of_two_rollouts(tokens())})
    assert topk[0]["cosine_dppo_topk_tv"] == pytest.approx(1.0)
    assert 0 < topk[0]["cosine_dppo_topk_kl"] < 1


def test_every_preset_is_evaluated_and_has_a_threshold_to_scale_or_none() -> None:
    inputs = tokens()
    inputs = replace(inputs, old_log_probs=(inputs.log_probs + inputs.rollout_log_probs) / 2)
    asked = [Variant(name, {"top_k": 4} if PRESETS[name].needs_topk else {}) for name in PRESETS]
    rows, pairs = evaluate_variants(asked, {"live": of_two_rollouts(inputs)})
    assert [row["preset"] for row in rows if not row["sensitivity"]] == ["pg_is", "pg_tis", "cispo"]
    for row in rows:
        own = next((each for each in row["sensitivity"] if each["factor"] == 1.0), None)
        assert own is None or own["masked_fraction"] == row["masked_fraction"], row["variant"]
        has_gradient = row["masked_fraction"] < 1
        assert -1 <= row["cosine_unmasked"] <= 1 if has_gradient else math.isnan(row["cosine_unmasked"])
        assert sum(each["num_tokens"] for each in row["by_prob"]) == inputs.advantages.count_nonzero()
    assert len(pairs["live"]["same_decision"]) == len(PRESETS)


def test_main_thresholds_are_scaled() -> None:
    twice = scale_threshold(preset("icepop"), 2.0)
    assert isinstance(twice, Band) and (twice.rho_low, twice.rho_high) == (0.25, 25.0)
    assert scale_threshold(preset("pg_tis"), 2.0) is None
    assert main_thresholds(preset("grpo_clip_higher")) == {"eps_low": 0.2, "eps_high": 0.28}
    assert main_thresholds(preset("dppo_binary_tv")) == {"delta_low": 0.15, "delta_high": 0.15}


MASK = "tests.support.own_rules:divergence_mask"


def test_a_rule_of_ones_own_is_swept_and_scaled() -> None:
    swept = parse_sweeps(["rule_options.delta=0.15,0.3", "eps_low=0.1"])
    asked = variants(Variant("dppo_binary_tv"), ["grpo", MASK], swept)
    names = ["dppo_binary_tv", "grpo eps_low=0.1", f"{MASK} delta=0.15", f"{MASK} delta=0.3"]
    assert [variant.name for variant in asked] == names
    require_own_rules(asked)
    rows, pairs = evaluate_variants(asked, {"live": of_two_rollouts(tokens())})
    assert pairs["live"]["same_decision"][0][2] == 1.0, "it is DPPO's mask"
    assert [each["masked_fraction"] for each in rows[2]["sensitivity"]] == [
        each["masked_fraction"] for each in rows[0]["sensitivity"]
    ]
    swept = parse_sweeps(["rule_options.is_hard=true", "rule_options.name=a"])
    assert swept == {"rule_options.is_hard": [True], "rule_options.name": ["a"]}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "tests.support.own_rules:failing",
            {},
            "--preset: found 'tests.support.own_rules:failing', which fails on a small batch: KeyError",
        ),
        ("tests.support.own_rules:negative", {}, "expected finite weights >= 0"),
        ("tests.support.own_rules:absent", {}, "'absent' is not there"),
        (MASK, {"rule_divergence": "full"}, "found 'full'"),
    ],
)
def test_rules_that_fail_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_own_rules([Variant(name, fields)])


def test_a_module_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rules.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"found 'broken_rules:any', which fails \(ZeroDivisionError"):
        variants(Variant("grpo"), ["broken_rules:any"], {})


def test_words_that_are_no_rollouts_are_refused() -> None:
    assert rollouts_of(["3", "all", "1"], [1, 2, 3]) == (3, 1, 2)
    assert rollouts_of([], [1, 2, 3]) == (3,)
    with refused("--rollout", "'last'", "1, 2"):
        rollouts_of(["last"], [1, 2])


def answer(asked: list[Variant]) -> dict[str, Any]:
    """The result of `answer` on made-up tokens."""
    rows, pairs = evaluate_variants(asked, {"live": of_two_rollouts(tokens())})
    mismatch = {"abs_prob_diff_mean": 1e-3, "kl_k3": 1e-4, "ratio_min": 0.1, "ratio_max": 3.0}
    return {
        "run": "runs/<r3>",
        "checkpoint": "runs/r3/checkpoints/step_00000001",
        "before": None,
        "rollouts": [0, 1],
        "num_tokens": 400,
        "trained_routes": "live",
        "mismatch": {"live": mismatch},
        "variants": [variant.name for variant in asked],
        "left_out": {"minirl": "whose anchor is the trainer's policy before the steps"},
        "rows": rows,
        "agreement": pairs,
    }


def test_table_shows_all_variants() -> None:
    names = ["grpo", "drpo", "gspo", "pg_is"]
    asked = [Variant("dppo_topk_tv", {"top_k": 4}), *(Variant(name) for name in names)]
    long = Variant("dppo_topk_tv", {"top_k": 4, "delta_low": 0.125, "delta_high": 0.25})
    found = answer([*asked, long])
    text = as_text(found)
    assert max(map(len, text.splitlines())) <= 100
    assert long.name in text.splitlines(), "a long name gets a separate line"
    assert "left out: minirl, whose anchor" in text and "standard deviation over rollouts" in text
