"""The named objectives: the paper's variants, with its thresholds (sections 5, 6 and App. D, F)."""

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from megatron_dppo.algorithms.objective import DELTAS, Objective
from megatron_dppo.errors import ConfigError, Problem, did_you_mean


def _ratio(name: str, eps_low: float, eps_high: float, **others: Any) -> Objective:
    return Objective(name, rule="ratio", eps_low=eps_low, eps_high=eps_high, **others)


def _dppo(name: str, divergence: str, delta: float, **others: Any) -> Objective:
    deltas = {"delta_low": delta, "delta_high": delta}
    return Objective(name, rule="divergence", divergence=divergence, **deltas, **others)


def _negative(name: str, delta: float, **others: Any) -> Objective:
    return Objective(name, rule="negative", delta_low=delta, delta_high=delta, **others)


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
        )
    }
)


_OF_A_PRESET = ("name", "rule", "divergence", "relax")
OVERRIDABLE: tuple[str, ...] = (
    "delta",
    *(field.name for field in fields(Objective) if field.name not in _OF_A_PRESET),
)
"""What may be set of a preset: the fields of `Objective` that do not make another rule of it, and `delta`."""


_OTHERWISE = "Choose from that list, or leave it out."


def overrides_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of [algorithm] that override a preset's fields, as keywords of `preset`."""
    return {name: settings[name] for name in OVERRIDABLE if settings.get(name) is not None}


def preset(name: str, **overrides: Any) -> Objective:
    """The preset of that name, with fields overridden by keyword.

    `delta` sets both sides; a side's own wins.

    Raises:
        ConfigError: There is no such preset, the preset has no use for a field, or a value is out of range.
    """
    if name not in PRESETS:
        options = "one of " + ", ".join(PRESETS)
        raise ConfigError(Problem("preset", repr(name), options, did_you_mean(name, PRESETS, _OTHERWISE)))
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
