"""Presets, their overrides, and what is refused."""

import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.algorithms.paper_rules import PAPER, Divergence
from megatron_dppo.algorithms.presets import OVERRIDABLE, overrides_in
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.errors import ConfigError
from tests.support.refusals import refused

REFERENCE = Path(__file__).parents[2] / "docs/reference/trust_regions.md"

# Presets of other papers are in the table of the reference and in the exact vectors.
# name: (delta_low, delta_high, eps_low, eps_high, alpha, ratio_cap, anchor), "-" where it has no use for one
TABLE = {
    "pg_is": ("-", "-", "-", "-", "-", math.inf, "rollout"),
    "pg_tis": ("-", "-", "-", "-", "-", 3, "rollout"),
    "cispo": ("-", "-", "-", "-", "-", 5, "rollout"),
    "grpo": ("-", "-", 0.2, 0.2, "-", math.inf, "rollout"),
    "grpo_clip_higher": ("-", "-", 0.2, 0.28, "-", math.inf, "rollout"),
    "minirl": ("-", "-", 0.2, 0.28, "-", math.inf, "recomputed"),
    "minirl_tis": ("-", "-", 0.2, 0.28, "-", 3, "recomputed"),
    "dppo_binary_tv": (0.15, 0.15, "-", "-", "-", math.inf, "rollout"),
    "dppo_binary_kl": (0.05, 0.05, "-", "-", "-", math.inf, "rollout"),
    "dppo_topk_tv": (0.2, 0.2, "-", "-", "-", math.inf, "rollout"),
    "dppo_topk_kl": (0.05, 0.05, "-", "-", "-", math.inf, "rollout"),
    "dppo_binary_tv_decoupled": (0.15, 0.15, "-", "-", "-", math.inf, "recomputed"),
    "dppo_binary_kl_decoupled": (0.05, 0.05, "-", "-", "-", math.inf, "recomputed"),
    "negative_mask": (0.5, "-", "-", "-", "-", math.inf, "rollout"),
    "negative_mask_recomputed": (0.5, "-", "-", "-", "-", math.inf, "recomputed"),
    "relax_high": ("-", "-", 0.2, 0.28, 0.1, math.inf, "rollout"),
    "relax_low": ("-", "-", 0.2, 0.28, 0.1, math.inf, "rollout"),
    "relax_both": ("-", "-", 0.2, 0.28, 0.1, math.inf, "rollout"),
}
COLUMNS = ("delta_low", "delta_high", "eps_low", "eps_high", "alpha", "ratio_cap", "anchor")


def test_table_of_the_papers():
    assert set(TABLE) == set(PAPER)
    for name, row in TABLE.items():
        objective = PRESETS[name]
        used = {c: v for c, v in zip(COLUMNS, row, strict=True) if v != "-"}
        assert {c: getattr(objective, c) for c in used} == used, name
        assert set(used) == set(COLUMNS) & set(objective.fields_in_use), name
        assert (objective.top_k, objective.include_other, objective.sampled_token) == (20, True, "union")
        assert objective.entropy_coef == 0


def test_the_reference_lists_each_preset_with_its_settings():
    section = REFERENCE.read_text(encoding="utf-8").partition("\n## The presets\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (?:`([^`]*)`)? ?\|$", section, re.MULTILINE))
    assert list(rows) == list(PRESETS)
    for name, settings in rows.items():
        objective, nothing = PRESETS[name], {f.name: f.default for f in fields(PRESETS[name])}
        written = dict(re.findall(r"(\w+) ([\w.]+)", settings))
        for field, value in written.items():
            found = getattr(objective, field)
            assert found == (value if isinstance(found, str) else float(value)), (name, field)
        named = {*written, *(("delta_low", "delta_high") if "delta" in written else ())}
        in_use = {field for field in objective.fields_in_use if field != "delta"}
        assert {f for f in in_use if getattr(objective, f) != nothing[f]} <= named, name
        assert objective.needs_topk == ("top_k" in written), name


def test_objectives_are_frozen_values():
    assert preset("grpo") == PRESETS["grpo"]
    assert hash(preset("grpo")) == hash(PRESETS["grpo"])
    with pytest.raises(FrozenInstanceError):
        PRESETS["grpo"].ratio_cap = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        PRESETS["grpo"] = PRESETS["pg_is"]  # type: ignore[index]


def test_delta_sets_both_sides_and_a_side_wins():
    def deltas(name: str, **overrides: float) -> tuple[float | None, ...]:
        objective = preset(name, **overrides)
        return tuple(getattr(objective, field, None) for field in ("delta_low", "delta_high", "delta"))

    assert deltas("dppo_binary_tv", delta=0.3) == (0.3, 0.3, 0.3)
    assert deltas("dppo_binary_tv", delta_high=0.1, delta=0.3) == (0.3, 0.1, None)
    assert deltas("dppo_binary_tv", delta_low=0.4) == (0.4, 0.15, None)
    assert deltas("negative_mask", delta=0.8) == (0.8, None, 0.8)


def test_config_section_has_the_objectives_fields():
    overrides = {"delta": 0.1, "top_k": 5, "sampled_token": "replace", "include_other": False}
    config = AlgorithmConfig.model_validate({"preset": "dppo_topk_tv", **overrides})
    objective = preset(config.preset, **overrides_in(config.model_dump()))
    assert (objective.delta, objective.top_k, objective.sampled_token) == (0.1, 5, "replace")
    every_field = {f for o in PRESETS.values() for f in o.fields_in_use}
    assert every_field <= set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_in_use_can_be_overridden(name: str):
    values = {
        "anchor": "rollout",
        "top_k": 3,
        "include_other": True,
        "sampled_token": "replace",
        "ratio_cap": 9.0,
        "rho_high": 6.0,
        "prefix_delta_max": 0.5,
        "ref_kl": "k1",
    }
    for field in PRESETS[name].fields_in_use:
        value = values.get(field, 0.01)
        assert getattr(preset(name, **{field: value}), field if field != "delta" else "delta_low") == value


REFUSED = {
    "unknown preset": ("dppo_binary_tw", {}, "Did you mean 'dppo_binary_tv'"),
    "another case": ("GRPO", {}, r"Did you mean 'grpo'\?"),
    "the begin of two": ("Grp", {}, "Did you mean 'grpo' or 'grpo_clip_higher'?"),
    "the begin of three": ("relax_", {}, "Did you mean 'relax_high', 'relax_low' or 'relax_both'?"),
    "far from any": ("xyzzy", {}, "one of pg_is, pg_tis"),
    "unknown field": ("dppo_binary_tv", {"delta_hihg": 0.1}, "Did you mean 'delta_high'"),
    "rule": ("pg_is", {"rule": "ratio"}, "pg_is.rule"),
    "unused alpha": ("dppo_binary_tv", {"alpha": 0.1}, "fields that dppo_binary_tv uses: delta, delta_low"),
    "unused delta": ("grpo", {"delta": 0.1}, "fields that grpo uses: eps_low, eps_high"),
    "unused side": ("negative_mask", {"delta_high": 0.1}, "delta, delta_low"),
    "unused top_k": ("dppo_binary_kl", {"top_k": 5}, "dppo_binary_kl.top_k"),
    "negative delta": ("dppo_binary_tv", {"delta": -0.1}, ">= 0"),
    "nan delta": ("dppo_binary_tv", {"delta_low": math.nan}, "delta_low: found nan"),
    "string delta": ("dppo_binary_tv", {"delta": "0.1"}, "found '0.1'"),
    "none delta": ("dppo_binary_tv", {"delta": None}, "found None"),
    "bool delta": ("dppo_binary_tv", {"delta": True}, "found True"),
    "negative eps": ("grpo", {"eps_low": -0.2}, "eps_low: found -0.2"),
    "negative eps high": ("grpo", {"eps_high": -0.2}, "eps_high: found -0.2"),
    "zero cap": ("cispo", {"ratio_cap": 0}, "ratio_cap: found 0"),
    "nan cap": ("cispo", {"ratio_cap": math.nan}, "ratio_cap"),
    "negative alpha": ("relax_both", {"alpha": -1}, "alpha"),
    "zero top_k": ("dppo_topk_tv", {"top_k": 0}, "integer >= 1"),
    "fractional top_k": ("dppo_topk_tv", {"top_k": 2.5}, "integer >= 1"),
    "anchor": ("grpo", {"anchor": "old"}, "'rollout', 'recomputed'"),
    "sampled_token": ("dppo_topk_tv", {"sampled_token": "add"}, "'union', 'replace'"),
    "include_other": ("dppo_topk_tv", {"include_other": "no"}, "True, False"),
    "entropy": ("grpo", {"entropy_coef": -0.1}, "entropy_coef"),
    "topk recomputed": ("dppo_topk_tv", {"anchor": "recomputed"}, "known of mu alone"),
    "crossed rho": ("icepop", {"rho_low": 6.0}, "rho_low: found 6.0; expected at most rho_high, 5"),
    "crossed budget": ("cppo", {"prefix_delta_max": 0.01}, "prefix_delta: found 0.02; expected at most"),
    "nan rho": ("mis", {"rho_high": math.nan}, "rho_high: found nan"),
    "negative kl": ("trm", {"token_kl": -0.1}, "token_kl: found -0.1; expected a number >= 0"),
    "infinite tau": ("sapo", {"tau_low": math.inf}, "tau_low: found inf; expected a finite number"),
    "negative tau": ("sapo", {"tau_high": -1.0}, "tau_high: found -1.0"),
    "late weight": ("cppo_topk", {"late_weight": -0.1}, "late_weight: found -0.1"),
    "negative coefficient": ("ipo", {"log_ratio_coef": -1e-3}, "log_ratio_coef: found -0.001"),
    "negative kl coefficient": ("grpo", {"ref_kl_coef": -0.04}, "ref_kl_coef: found -0.04"),
    "infinite kl coefficient": ("grpo", {"ref_kl_coef": math.inf}, "ref_kl_coef: found inf; expected a finite"),
    "kl estimator": ("grpo", {"ref_kl": "k2"}, "ref_kl: found 'k2'; expected one of 'k3', 'k1'"),
    "stale share": ("sat", {"stale_share": 1.5}, "stale_share: found 1.5; expected a number from 0 to 1"),
    "no power": ("vespo", {"power_low": 0}, "power_low: found 0; expected a number > 0"),
    "infinite decay": ("vespo", {"decay_high": math.inf}, "decay_high: found inf; expected a finite number"),
    "a cap of no ratio": ("gmpo", {"ratio_cap": 2.0}, "fields that gmpo uses: eps_low, eps_high, anchor"),
    "linear at 0": ("drpo", {"delta_low": 0}, "delta_low: found 0; expected a number > 0"),
    "importance": ("gspo", {"importance": "token"}, "gspo.importance"),
    "unused tau": ("gspo", {"tau_low": 1.0}, "fields that gspo uses: eps_low, eps_high, ratio_cap"),
    "kl without other": ("dppo_topk_kl", {"include_other": False}, "sum to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    name, overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        preset(name, **overrides)


def test_all_faults_at_once_and_for_hand_made_objectives_too():
    with pytest.raises(ConfigError) as caught:
        preset("grpo", eps_low=-1, ratio_cap=-1)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="divergence"):
        Divergence(name="mine", divergence="hellinger")
    with pytest.raises(ConfigError, match="eps_low"):
        replace(PRESETS["grpo"], eps_low=-1)
    for name in ("dppo_topk_kl_predictive", "estr"):
        with refused(f"{name}.divergence", "'binary_kl'"):
            replace(PRESETS[name], divergence="binary_kl")
    for name, importance in (("vespo", "token"), ("grpo", "rule")):
        with refused(f"{name}.importance", f"'{importance}'"):
            replace(PRESETS[name], importance=importance)


def test_overrides_in_a_config_are_exactly_the_objectives_fields():
    """A key of [algorithm] that no field is named like never becomes one."""
    settings = AlgorithmConfig.model_validate({"delta": 0.1, "eps_low": 0.3}).model_dump()
    assert overrides_in(settings | {"temperature_of_tomorrow": 2.0}) == {"delta": 0.1, "eps_low": 0.3}
    assert set(OVERRIDABLE) <= set(AlgorithmConfig.model_fields)
    objectives = [*PRESETS.values(), preset("tests.support.own_rules:halves")]
    assert set(OVERRIDABLE) == {field for each in objectives for field in each.fields_in_use}
