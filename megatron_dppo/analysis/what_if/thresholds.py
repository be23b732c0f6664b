"""Scales the main threshold of a trust region, for its sensitivity to it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megatron_dppo.algorithms import Objective
from megatron_dppo.algorithms.objective import Rule

FACTORS = (0.5, 1.0, 2.0)
"""What the main threshold is multiplied by."""

_DELTAS = ("delta_low", "delta_high")
_EPS = ("eps_low", "eps_high")
_RHOS = ("rho_low", "rho_high")  # bounds of a ratio around 1: their logarithms are scaled
MAIN: Mapping[Rule, tuple[str, ...]] = MappingProxyType(
    {
        "ratio": _EPS,
        "divergence": _DELTAS,
        "negative": ("delta_low",),
        "distance": _DELTAS,
        "linear": _DELTAS,
        "prediction": _DELTAS,
        "band": _RHOS,
        "sigmoid": ("tau_low", "tau_high"),
        "response_ratio": _EPS,
        "response_mismatch": _RHOS,
        "response_divergence": ("token_kl", "response_kl"),
        "prefix": (*_DELTAS, "prefix_delta", "prefix_delta_max"),
    }
)
"""Fields of each rule's main threshold. "none" has no threshold. `main_thresholds` handles "own"."""


def main_thresholds(objective: Objective) -> dict[str, float]:
    """Return the numbers of the main threshold, or none if the rule has none or all are infinite.

    A custom rule's main threshold is its option `delta`, else its only numeric option.
    """
    if objective.own is not None:
        options = dict(objective.own.options)
        numbers = {name: float(x) for name, x in options.items() if type(x) in (int, float)}
        if "delta" in numbers:
            return {"delta": numbers["delta"]}
        return numbers if len(numbers) == 1 else {}
    found = {name: float(getattr(objective, name)) for name in MAIN.get(objective.rule, ())}
    return found if any(math.isfinite(value) for value in found.values()) else {}


def with_scaled_threshold(objective: Objective, factor: float) -> Objective | None:
    """Return the objective with its main threshold multiplied by a factor, or `None` without a threshold."""
    found = main_thresholds(objective)
    if not found:
        return None
    scaled = {name: value**factor if name in _RHOS else value * factor for name, value in found.items()}
    if objective.own is None:
        return replace(objective, **scaled)
    options = tuple((name, scaled.get(name, value)) for name, value in objective.own.options)
    return replace(objective, own=replace(objective.own, options=options))


def described_threshold(objective: Objective) -> str:
    """Return the main threshold in words: "delta 0.2", "eps_low 0.2, eps_high 0.28", or nothing."""
    found = main_thresholds(objective)
    if len(found) == 2 and found.keys() == set(_DELTAS) and len(set(found.values())) == 1:
        found = {"delta": next(iter(found.values()))}
    return ", ".join(f"{name} {value:g}" for name, value in found.items())
