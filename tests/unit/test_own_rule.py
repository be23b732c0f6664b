"""A user's own trust-region rule, from its name in the config to the loss."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.actor.observation import Observer
from megatron_dppo.algorithms import PolicyLossInputs, policy_loss, preset
from megatron_dppo.algorithms.inputs import place_of_tokens
from megatron_dppo.algorithms.own_rule import Own, own_objective
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.algorithms.shadow import rule_values, shadow_weights
from megatron_dppo.algorithms.trial import doubts, try_objective
from megatron_dppo.analysis.what_if.question import Variant, parse_sweeps, require_own_rules, variants
from megatron_dppo.checks import RULES, check, remarks
from megatron_dppo.config import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import TrackingConfig
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss
from megatron_dppo.metrics.metrics import Metrics
from tests.support.loss_batches import make_batch
from tests.support.refusals import refused

README, REFERENCE = (
    Path(__file__).parents[2] / page
    for page in ("megatron_dppo/algorithms/README.md", "docs/reference/trust_regions.md")
)
MASK = "tests.support.own_rules:divergence_mask"


def own(name: str, **options: Any) -> Own:
    over = "responses" if "responses" in name else "tokens"
    return own_objective(f"tests.support.own_rules:{name}", rule_options=options, rule_over=over)


@pytest.mark.parametrize("like", ["dppo_binary_tv", "dppo_binary_kl", "dppo_topk_tv", "dppo_topk_kl"])
def test_dppo_as_a_custom_rule_equals_the_preset(like: str) -> None:
    columns = {"top_k": 6} if "topk" in like else {}
    built_in = preset(like, delta=1e-3, **columns)
    mine = preset(MASK, rule_options={"delta": 1e-3}, rule_divergence=built_in.divergence, **columns)
    batch = make_batch(torch.float64)
    for loss, inputs in (
        (fused_policy_loss, (batch.logits,)),
        (fused_linear_policy_loss, (batch.hidden, batch.weight)),
    ):
        found, gradients = [], []
        for objective in (built_in, mine):
            given = [each.clone().requires_grad_() for each in inputs]
            out = loss(*given, **batch.arguments, objective=objective)
            out.loss_sum.backward()
            found.append(out)
            gradients.append([each.grad for each in given])
        assert 0 < int(found[0].mask.sum()) < int(batch.microbatch.loss_mask.sum())
        for name in ("weight", "mask", "coefficient", "divergence"):
            assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=0)


def test_custom_rule_sees_whole_responses() -> None:
    pi, mu = torch.tensor([-1.0, -1.0, -2.0, -2.5]).double(), torch.tensor([-1.0, -1.1, -1.0, -1.0]).double()
    lengths = torch.tensor([2, 0, 2])
    inputs = PolicyLossInputs(pi, mu, torch.ones(4).double(), response_lengths=lengths)
    out = policy_loss(own("steady_responses", delta=0.1), inputs)
    assert out.mask.tolist() == [True, True, False, False]


def test_custom_rule_sees_token_positions_without_a_second_pass() -> None:
    """Both count learning tokens: the second token of the first response is an environment's."""
    learns = torch.tensor([True, False, True, True, False, True, True])
    first, second = (place_of_tokens(mask) for mask in learns.split([4, 3]))
    assert [each.tolist() for each in (*first, *second)] == [[0, 0, 1, 2], [3, 0, 3, 3], [0, 0, 1], [0, 2, 2]]
    pi, rule = torch.full((7,), -1.0), own("late", share=0.5)
    assert not rule.needs_responses
    inputs = PolicyLossInputs(pi, pi, torch.ones(7), loss_mask=learns)
    with pytest.raises(ConfigError, match="place_of_tokens"):
        policy_loss(rule, inputs)
    positions, lengths = (torch.cat(pair) for pair in zip(first, second, strict=True))
    inputs = replace(inputs, positions=positions, lengths=lengths)
    assert policy_loss(rule, inputs).mask.tolist() == [True, False, True, False, False, True, False]
    assert rule_values(rule, inputs)["place"].tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3, 0, 0, 0.5])


def test_rows_that_do_not_learn_may_have_any_weight() -> None:
    pi = torch.full((3,), -1.0)
    learns = torch.tensor([True, False, True])
    out = policy_loss(own("halves"), PolicyLossInputs(pi, pi, torch.ones(3), loss_mask=learns))
    assert out.weight.tolist() == [0.5, 0.0, 0.5]
    assert out.coefficient.tolist() == [0.5, 0.0, 0.5]


def test_result_of_a_custom_rule_is_checked() -> None:
    for name, message in (
        (
            "total",
            r"tests.support.own_rules:total: found a tensor of shape \[\], .*; expected a real tensor \[20\]",
        ),
        ("nothing", r"tests.support.own_rules:nothing: found NoneType; expected a real tensor \[20\]"),
        (
            "negative",
            r"tests.support.own_rules:negative: found -.* for token \d+ \(.*\); expected finite weights >= 0",
        ),
        ("infinite", r"tests.support.own_rules:infinite: found inf for token"),
        ("misnamed", r"tests.support.own_rules:misnamed: found a tuple of 2; expected weights, or a pair of"),
        ("unmeasured", r"tests.support.own_rules:unmeasured: found inf for token .*; expected finite gap"),
    ):
        with pytest.raises(ConfigError, match=message):
            try_objective(own(name))


def _problems(tmp_path: Path, *others: Path, **algorithm: Any) -> str:
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in algorithm.items()]
    toml = tmp_path / "own.toml"
    toml.write_text("\n".join(["[algorithm]", *lines, "[data]", 'reward = "arithmetic"']))
    config = load_config([toml, *others], [])
    names = ("preset", "preset_fields", "own_rule", "topk_log_probs")
    return "\n".join(str(problem) for problem in check(config, 1, {name: RULES[name] for name in names}))


def test_check_tries_the_custom_rule(tmp_path: Path) -> None:
    assert _problems(tmp_path, preset="tests.support.own_rules:halves") == ""
    for name, message in (
        ("absent", "algorithm.preset: found 'tests.support.own_rules:absent', and 'absent' is not there"),
        (
            "failing",
            "algorithm.preset: found 'tests.support.own_rules:failing', which fails on a small batch: "
            "KeyError: 'absent'",
        ),
        ("negative", "algorithm.preset: found -"),
        ("steady_responses", "algorithm.rule_over: found 'tokens', but the rule reads complete responses"),
    ):
        found = _problems(tmp_path, preset=f"tests.support.own_rules:{name}")
        assert message in found, found
    assert "no module 'no_such_module'" in _problems(tmp_path, preset="no_such_module:rule")


def test_settings_of_a_custom_rule_are_checked(tmp_path: Path) -> None:
    found = _problems(tmp_path, preset="tests.support.own_rules:halves", rule_divergence="topk_kl")
    assert "rollout.num_topk_log_probs: found 0; expected at least 20" in found
    assert "divergence: found 'topk'" in _problems(
        tmp_path, preset="tests.support.own_rules:halves", rule_divergence="topk"
    )
    found = _problems(tmp_path, preset="dppo_binary_tv", rule_over="responses")
    assert "algorithm.rule_over: found 'responses'; expected the fields that dppo_binary_tv uses" in found
    found = _problems(tmp_path, preset="tests.support.own_rules:halves", delta=0.1)
    assert "algorithm.delta: found 0.1; expected the fields that tests.support.own_rules:halves uses" in found


def test_rule_on_old_log_probs_is_refused_without_them(tmp_path: Path) -> None:
    """A run that trains with it makes them: `check` finds nothing wrong; a Top-K one has no such anchor."""
    settings = {"preset": MASK, "anchor": "recomputed"}
    toml = tmp_path / "options.toml"
    toml.write_text("[algorithm]\nrule_options = { delta = 0.1 }\n")
    assert _problems(tmp_path, toml, **settings) == ""
    found = _problems(tmp_path, toml, **settings, rule_divergence="topk_tv")
    assert "algorithm.anchor: found 'recomputed' with a Top-K divergence; expected 'rollout'" in found
    objective, batch = preset(MASK, anchor="recomputed", rule_options={"delta": 0.1}), make_batch(torch.float32)
    given: dict[str, Any] = batch.arguments | {"old_log_probs": None}
    pi = torch.full((3,), -1.0)
    message = rf"old_log_probs of {MASK}: found none; expected a .*tensor, because anchor = 'recomputed'"
    for loss in (
        lambda: policy_loss(objective, PolicyLossInputs(pi, pi, torch.ones(3))),
        lambda: fused_policy_loss(batch.logits, **given, objective=objective),
        lambda: fused_linear_policy_loss(batch.hidden, batch.weight, **given, objective=objective),
    ):
        with pytest.raises(ConfigError, match=message):
            loss()


def test_custom_rule_is_evaluated_as_a_shadow(tmp_path: Path) -> None:
    names = ("shadow_presets", "own_rule")

    def problems(shadow: str) -> str:
        settings = [f'tracking.shadow_presets = ["grpo", "{shadow}"]', 'data.reward = "arithmetic"']
        (tmp_path / "shadow.toml").write_text("\n".join(settings))
        config = load_config([tmp_path / "shadow.toml"], [])
        return "\n".join(str(problem) for problem in check(config, 1, {name: RULES[name] for name in names}))

    assert problems("tests.support.own_rules:halves") == ""
    assert "tracking.shadow_presets: found 'tests.support.own_rules:absent', and 'absent' is not" in problems(
        "tests.support.own_rules:absent"
    )
    assert "tracking.shadow_presets: found 'tests.support.own_rules:failing', which fails on" in problems(
        "tests.support.own_rules:failing"
    )
    found = problems("tests.support.own_rules:averages")
    assert "tracking.shadow_presets: found 'tokens', but the rule reads complete responses" in found
    assert 'Set tracking.shadow_options."tests.support.own_rules:averages".rule_over = "responses".' in found
    with refused("--preset", "'tokens'", "--sweep rule_over=responses"):
        require_own_rules([Variant("tests.support.own_rules:averages")])
    assert "names among pg_is, " in problems("halves")
    tracking = TrackingConfig(shadow_presets=("grpo", "tests.support.own_rules:halves"))
    observer = Observer(preset("dppo_binary_tv"), tracking, num_topk_log_probs=0)
    pi = torch.full((3,), -1.0)
    weights = shadow_weights(observer.shadows, PolicyLossInputs(pi, pi, torch.ones(3)))
    assert {name: weight.tolist() for name, weight in weights.items()} == {
        "grpo": [1.0] * 3,
        "tests.support.own_rules:halves": [0.5] * 3,
    }


def test_an_option_that_a_rule_does_not_declare_is_refused(tmp_path: Path) -> None:
    rule = {"preset": "tests.support.own_rules:declared"}
    for options, message in (
        (
            {"limti": 0.1},
            "algorithm.rule_options: found 'limti'; expected options of tests.support.own_rules:declared: "
            "limit, is_s",
        ),
        (
            {"delta": 0.1},
            "found 'delta'; expected options of tests.support.own_rules:declared: limit, is_soft. Choose one",
        ),
        ({"limit": "0.1"}, "found limit = '0.1'; expected a number, as 0.2"),
        ({"is_soft": 1}, "found is_soft = 1; expected a boolean, as False"),
    ):
        toml = tmp_path / "options.toml"
        toml.write_text(f"[algorithm.rule_options]\n{next(iter(options))} = {next(iter(options.values()))!r}\n")
        assert message in _problems(tmp_path, toml, **rule)
    with pytest.raises(ConfigError, match="Did you mean 'limit'"):
        preset("tests.support.own_rules:declared", rule_options={"limti": 0.1})
    objective = preset("tests.support.own_rules:declared", rule_options={"limit": 1})
    assert objective.rule_options == {"limit": 1, "is_soft": False}, "defaults are there"
    swept = ["rule_options.limti=0.1"]
    with refused("--sweep", "rule_options.limti", "'rule_options.limit'"):
        variants(Variant("grpo"), ["tests.support.own_rules:declared"], parse_sweeps(swept))


def test_suspicious_custom_rules_are_reported(tmp_path: Path) -> None:
    """An option that nothing reads, a rule that keeps nothing: of what trains, and of shadows."""

    def said(name: str, **options: Any) -> str:
        return " ".join(doubts(preset(f"tests.support.own_rules:{name}", rule_options=options)))

    assert said("undeclared") == said("undeclared", delta=0.1) == said("declared") == said("halves") == ""
    assert "did not read the option delat on a small batch" in said("undeclared", delat=0.1)
    assert "did not read the options a, b on" in said("halves", b=1, a=2)
    assert "tests.support.own_rules:drops_all drops every token of a small batch: nothing is left" in said(
        "drops_all"
    )
    assert "drops every token of a small batch whose policy has moved:" in said("undeclared", delta=0.0)
    assert "drops every token of a small batch whose pi equals mu:" in said("keeps_moved")
    given = {
        "algorithm": {"preset": "tests.support.own_rules:undeclared", "rule_options": {"delat": 0.1}},
        "tracking": {"shadow_presets": ["tests.support.own_rules:drops_all"]},
    }
    first, second = remarks(Config.model_validate(given))
    assert first.startswith(
        "algorithm.preset: tests.support.own_rules:undeclared did not read the option delat"
    )
    assert second.startswith(
        "tracking.shadow_presets tests.support.own_rules:drops_all: tests.support.own_rules:drops_all "
        "drops every token"
    )


def test_error_for_a_rule_on_outcomes_names_the_divergences(caplog: pytest.LogCaptureFixture) -> None:
    name = "tests.support.own_rules:tail_mass"
    with refused("algorithm.rule_divergence", "log_masses", "'topk_tv'"):
        try_objective(preset(name))
    with refused("--preset", "log_masses", "--sweep rule_divergence=topk_tv"):
        require_own_rules([Variant(name)])
    require_own_rules([Variant(name, {"rule_divergence": "topk_kl"})])
    tables: dict[str, Any] = {"tracking": {"shadow_presets": [name]}, "rollout": {"num_topk_log_probs": 20}}
    rules = {rule: RULES[rule] for rule in ("shadow_presets", "own_rule")}
    (problem,) = check(Config.model_validate(tables), 1, rules)
    assert f'Set tracking.shadow_options."{name}".rule_divergence = "topk_tv".' in str(problem)
    tables["tracking"]["shadow_options"] = {name: {"rule_divergence": "topk_tv"}}
    assert not check(Config.model_validate(tables), 1, rules)
    require_own_rules([Variant("tests.support.own_rules:drops_all")])
    assert "tests.support.own_rules:drops_all drops every token of a small batch" in caplog.text


def test_a_shadow_has_options(tmp_path: Path) -> None:
    """Two shadows, in another order than their tables, each with separate options; one sees whole responses."""
    averages, limited = "tests.support.own_rules:averages", "tests.support.own_rules:declared"
    tables: dict[str, Any] = {
        "shadow_presets": [limited, "grpo", averages],
        "shadow_options": {averages: {"rule_over": "responses"}, limited: {"rule_options": {"limit": 0.01}}},
    }
    rules = {rule: RULES[rule] for rule in ("shadow_presets", "own_rule")}
    assert not check(Config.model_validate({"tracking": tables}), 1, rules)
    observer = Observer(preset("dppo_binary_tv"), TrackingConfig(**tables), num_topk_log_probs=0)
    pi, mu = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.2, -0.1])
    inputs = PolicyLossInputs(pi, mu, torch.ones(3), response_lengths=torch.tensor([2, 1]))
    weights = {name: weight.tolist() for name, weight in shadow_weights(observer.shadows, inputs).items()}
    assert weights == {limited: [1.0, 0.0, 1.0], "grpo": [1.0, 0.0, 1.0], averages: [1.0, 1.0, 0.0]}
    for options, message in (
        (
            {"tests.support.own_rules:halvse": {}},
            r"tracking.shadow_options: found 'tests.support.own_rules:halvse'; expected names in",
        ),
        ({limited: {"rule_options": {"limti": 1}}}, f"tracking.shadow_options.{limited}: found 'limti'"),
        (
            {"grpo": {"delta": 0.1}},
            "tracking.shadow_options.grpo: found 0.1; expected the fields that grpo uses",
        ),
    ):
        given = {"tracking": {**tables, "shadow_options": options}}
        found = "\n".join(map(str, check(Config.model_validate(given), 1, rules)))
        assert message in found, found


def test_readme_example_is_a_working_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text(encoding="utf-8").partition("## Custom trust regions\n")[2]
    section += REFERENCE.read_text(encoding="utf-8").partition("## What does a custom trust region get?\n")[2]
    code, toml = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL) for kind in ("python", "toml"))
    (tmp_path / "my_rules.py").write_text(code[0])
    (tmp_path / "own.toml").write_text(
        toml[0] + '[data]\nreward = "arithmetic"\n[rollout]\nnum_topk_log_probs = 20\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    config = load_config([tmp_path / "own.toml"], [])
    assert not list(check(config, 1, {name: RULES[name] for name in ("preset", "own_rule", "topk_log_probs")}))
    (tmp_path / "shadow.toml").write_text(toml[1])
    beside = load_config([tmp_path / "shadow.toml"], [])
    assert not check(beside, 1, {name: RULES[name] for name in ("shadow_presets", "own_rule")})
    assert not remarks(config) and not remarks(beside)
    objective = preset(config.algorithm.preset, **overrides_in(config.algorithm.model_dump()))
    weights = try_objective(objective).weight
    assert bool(((weights > 0) & (weights < 1)).any())


@pytest.mark.parametrize("as_shadow", [False, True])
def test_values_that_a_rule_names_become_metrics(as_shadow: bool) -> None:
    """Their means over the learning tokens of a micro-batch, of the training rule and of a shadow."""
    rules = {name: f"tests.support.own_rules:{name}" for name in ("measured", "measured_responses")}
    batch = make_batch(torch.float64)
    m = batch.microbatch
    for name, path in rules.items():
        mine = own(name)
        objective = preset("dppo_binary_tv") if as_shadow else mine
        shadow: dict[str, Any] = {path: {"rule_over": mine.rule_over}} if as_shadow else {}
        tracking = TrackingConfig(shadow=as_shadow, shadow_presets=tuple(shadow), shadow_options=shadow)
        out = fused_policy_loss(batch.logits, **batch.arguments, objective=objective)
        metrics = Metrics()
        observer = Observer(objective, tracking, num_topk_log_probs=0)
        observer.observe(metrics, out, m, is_first=False)
        area = f"shadow/{path}" if as_shadow else "rule"
        learns = m.loss_mask.bool()
        gap = (out.log_probs - m.rollout_log_probs)[learns].double()
        found = metrics.values()
        if name == "measured":
            away = (gap * m.advantages[learns] > 0).double()
            expected = {"gap": float(gap.mean()), "is_away": float(away.mean())}
            assert 0 < expected["is_away"] < 1
        else:
            lengths = [int(part.sum()) for part in learns.split(batch.arguments["response_lengths"].tolist())]
            expected = {"length": sum(n * n for n in lengths) / sum(lengths)}
        for value, mean in expected.items():
            assert found[f"{area}/{value}"] == pytest.approx(mean, rel=1e-9)
        assert sum("rule/" in key for key in found) == (0 if as_shadow else len(expected))
