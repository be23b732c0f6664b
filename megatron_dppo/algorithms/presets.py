"""The named objectives: the paper's variants with its thresholds (sections 5, 6; App. D, F), and others'."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from megatron_dppo.algorithms.objective import DELTAS, OWN_FIELDS, Objective, Rule
from megatron_dppo.algorithms.trust_region import Option, Over, OwnRule, complete_options
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.runtime.user_code import import_named, problem_with_path


def _ratio(name: str, eps_low: float, eps_high: float, **others: Any) -> Objective:
    return Objective(name, rule="ratio", eps_low=eps_low, eps_high=eps_high, **others)


def _dppo(name: str, divergence: str, delta: float, **others: Any) -> Objective:
    deltas = {"delta_low": delta, "delta_high": delta}
    return Objective(name, rule="divergence", divergence=divergence, **deltas, **others)


def _negative(name: str, delta: float, **others: Any) -> Objective:
    return Objective(name, rule="negative", delta_low=delta, delta_high=delta, **others)


def _clip(name: str, rule: Rule, **others: Any) -> Objective:
    return Objective(name, rule=rule, eps_low=0.2, eps_high=0.2, anchor="recomputed", **others)


def _prefix(name: str, divergence: str) -> Objective:
    return Objective(
        name,
        rule="prefix",
        divergence=divergence,
        delta_low=0.15,
        delta_high=0.15,
        prefix_delta=0.02,
        prefix_delta_max=0.04,
        late_weight=0.8,
    )


# Presets from other papers and frameworks; rules.py names the source of each. The thresholds are published,
# except estr's delta and clip, and minpro's clip. ipo's are prime-rl's defaults since 2026-09-18, and
# ipo_2026_08 has the ones before. gspo's are from its paper's experiments, and trm's .1 and .002 are quoted by
# arXiv 2606.10968. The predictive mask's .15 and K = 20 are from the experiments of arXiv 2607.10848, by a
# summary of that paper.
FIELD: tuple[Objective, ...] = (
    Objective("ipo", rule="distance", delta_low=0.3, delta_high=0.3),
    Objective("ipo_2026_08", rule="distance", delta_low=0.1, delta_high=0.1, log_ratio_coef=1e-3),
    Objective("drpo", rule="linear", delta_low=12.5, delta_high=12.5),
    _prefix("cppo", "binary_tv"),
    _prefix("cppo_topk", "topk_tv"),
    Objective("sapo", rule="sigmoid", tau_low=1.05, tau_high=1.0),
    Objective("gspo", rule="response_ratio", importance="response", eps_low=3e-4, eps_high=4e-4),
    _clip("icepop", "band", rho_low=0.5, rho_high=5.0),
    _clip("mis", "response_mismatch", rho_low=0.999, rho_high=1.002),
    Objective("trm", rule="response_divergence", divergence="topk_kl", token_kl=0.1, response_kl=0.002),
    Objective(
        "dppo_topk_kl_predictive", rule="prediction", divergence="topk_kl", delta_low=0.15, delta_high=0.15
    ),
    Objective(
        "estr",
        rule="entropy",
        divergence="topk_kl",
        delta_low=1.0,
        delta_high=1.0,
        eps_low=0.2,
        eps_high=0.2,
    ),
    Objective("sat", rule="staleness", eps_low=0.2, eps_high=0.2, stale_share=0.9),
    Objective(
        "vespo",
        rule="gamma",
        importance="rule",
        power_low=3.0,
        power_high=2.0,
        decay_low=2.0,
        decay_high=3.0,
    ),
    Objective("gmpo", rule="geometric", importance="rule", eps_low=0.4, eps_high=0.4),
    Objective("minpro", rule="lowest_prefix", importance="rule", eps_low=1.0, eps_high=4.0),
)

PRESETS: Mapping[str, Objective] = MappingProxyType(
    {
        objective.name: objective
        for objective in (
            Objective("pg_is"),
            Objective("pg_tis", ratio_cap=3.0),
            Objective("cispo", ratio_cap=5.0),
            _ratio("grpo", 0.2, 0.2),
            _ratio("grpo_clip_higher", 0.2, 0.28),
            _ratio("minirl", 0.2, 0.28, anchor="recomputed"),
            _ratio("minirl_tis", 0.2, 0.28, anchor="recomputed", ratio_cap=3.0),
            _dppo("dppo_binary_tv", "binary_tv", 0.15),
            _dppo("dppo_binary_kl", "binary_kl", 0.05),
            _dppo("dppo_topk_tv", "topk_tv", 0.2, top_k=20),
            _dppo("dppo_topk_kl", "topk_kl", 0.05, top_k=20),
            _dppo("dppo_binary_tv_decoupled", "binary_tv", 0.15, anchor="recomputed"),
            _dppo("dppo_binary_kl_decoupled", "binary_kl", 0.05, anchor="recomputed"),
            _negative("negative_mask", 0.5),
            _negative("negative_mask_recomputed", 0.5, anchor="recomputed"),
            _ratio("relax_high", 0.2, 0.28, relax="high", alpha=0.1),
            _ratio("relax_low", 0.2, 0.28, relax="low", alpha=0.1),
            _ratio("relax_both", 0.2, 0.28, relax="both", alpha=0.1),
            *FIELD,
        )
    }
)

PAPER: tuple[str, ...] = tuple(name for name in PRESETS if name not in {objective.name for objective in FIELD})
"""Names of the presets from the paper and its authors' code.

The paper runs them all but `dppo_binary_tv_decoupled`, which only the code has.
"""


_OF_A_PRESET = ("name", "rule", "divergence", "relax", "importance", "own")
OVERRIDABLE: tuple[str, ...] = (
    "delta",
    *OWN_FIELDS,
    *(field.name for field in fields(Objective) if field.name not in _OF_A_PRESET),
)
"""What may be set of a preset: the fields of `Objective` that do not make another rule of it, and `delta`."""


def _own(
    name: str,
    *,
    rule_divergence: str = "binary_tv",
    rule_over: Over = "tokens",
    rule_options: Mapping[str, Option] | None = None,
) -> Objective:
    """The objective of a user's own rule."""
    problem = problem_with_path("algorithm.preset", name, "package.module:function")
    if problem is not None:
        raise ConfigError(problem)
    function = import_named("algorithm.preset", name)
    options = complete_options(name, function, rule_options or {})
    rule = OwnRule(name, function, tuple(sorted(options.items())), rule_over)
    return Objective(name, rule="own", divergence=rule_divergence, own=rule)


_OTHERWISE = "Choose from that list, or leave it out."


def overrides_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [algorithm] that override a preset's fields, as keywords of `preset`."""
    return {name: settings[name] for name in OVERRIDABLE if settings.get(name) is not None}


def preset(name: str, **overrides: Any) -> Objective:
    """Return the preset of that name, with fields overridden by keyword.

    `delta` sets both `delta_low` and `delta_high`, unless one of them is given too. "package.module:function"
    names a custom rule: the function is imported, and gets `rule_options`. `rule_divergence` names the
    divergence that it reads, and `rule_over` selects tokens or complete responses.

    Raises:
        ConfigError: There is no such preset or function, it has no use for a field, or a value is out of range.
    """
    if ":" in name:
        objective = _own(name, **{field: overrides.pop(field) for field in OWN_FIELDS if field in overrides})
    elif name not in PRESETS:
        options = "one of " + ", ".join(PRESETS)
        raise ConfigError(Problem("preset", repr(name), options, did_you_mean(name, PRESETS, _OTHERWISE)))
    else:
        objective = PRESETS[name]
    usable = objective.fields_in_use
    unusable = [field for field in overrides if field not in usable]
    if unusable:
        expected = f"the fields that {name} uses: " + ", ".join(usable)
        problems = [
            Problem(f"{name}.{f}", repr(overrides[f]), expected, did_you_mean(f, usable, _OTHERWISE))
            for f in unusable
        ]
        raise ConfigError(problems)
    if "delta" in overrides:
        delta = overrides.pop("delta")
        overrides = {**{side: delta for side in DELTAS if side != "delta"}, **overrides}
    return replace(objective, **overrides)
