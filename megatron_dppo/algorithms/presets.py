"""The named objectives, and what may be set of them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, get_type_hints

from megatron_dppo.algorithms import response_rules, token_rules
from megatron_dppo.algorithms.divergence import registry
from megatron_dppo.algorithms.objective import DELTAS, Objective, registered_presets, registered_rules
from megatron_dppo.algorithms.own_rule import OWN_FIELDS, own_objective
from megatron_dppo.algorithms.paper_rules import PAPER
from megatron_dppo.errors import ConfigError, Problem, did_you_mean

assert token_rules and response_rules  # imported for their rules
RULES: Mapping[str, type[Objective]] = registry("RULES", registered_rules)
"""The trust-region rules, each a class of objectives."""
PRESETS: Mapping[str, Objective] = MappingProxyType(registered_presets)
FIELD: tuple[Objective, ...] = tuple(objective for name, objective in PRESETS.items() if name not in PAPER)
"""Presets from other papers and frameworks; each rule names its source.

The thresholds are published, except estr's delta and clip, and minpro's clip. ipo's are prime-rl's defaults
since 2026-09-18, and ipo_2026_08 has the ones before. gspo's are from its paper's experiments, and trm's .1 and
.002 are quoted by arXiv 2606.10968. The predictive mask's .15 and K = 20 are from the experiments of arXiv
2607.10848, by a summary of that paper.
"""

_FEW = 3  # presets that a setting's docstring names


def _settings() -> dict[str, tuple[Any, str]]:
    kinds = {name: get_type_hints(rule, include_extras=True) for name, rule in RULES.items()}
    found: dict[str, tuple[Any, str]] = {}
    for name, rule in RULES.items():
        for each in fields(rule):
            if "doc" in each.metadata and each.name not in found:
                users = [preset for preset, known in PRESETS.items() if each.name in known.own_fields]
                of = f"{', '.join(users)}: " if 0 < len(users) <= _FEW else ""
                found[each.name] = kinds[name][each.name], of + each.metadata["doc"]
    return found


SETTINGS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {"delta": (float, "Divergence threshold for both signs of the advantage."), **_settings()}
)
"""What `preset` may override of the package's rules: type and docstring of each field, and of `delta`."""
OVERRIDABLE: tuple[str, ...] = (*OWN_FIELDS, *SETTINGS)
"""What may be set of a preset: the fields that do not make another rule of it, and `delta`."""

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
        objective: Objective = own_objective(
            name, **{field: overrides.pop(field) for field in OWN_FIELDS if field in overrides}
        )
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
        sides = dict.fromkeys((side for side in DELTAS[1:] if side in usable), overrides.pop("delta"))
        overrides = {**sides, **overrides}
    return replace(objective, **overrides)
