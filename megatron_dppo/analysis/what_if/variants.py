"""Computes the masks of other trust regions from log-probs alone."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, policy_loss, preset
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.mismatch import add_mismatch
from megatron_dppo.metrics.token_mismatch import Routes

Value = float | int | str | bool


@dataclass(frozen=True)
class Variant:
    """A preset, and the fields of it that are swept."""

    preset: str
    fields: Mapping[str, Value] = field(default_factory=dict[str, Value])

    @property
    def objective(self) -> Objective:
        """The objective of the variant."""
        return preset(self.preset, **self.fields)

    @property
    def name(self) -> str:
        """Name of the preset, then its fields."""
        return " ".join([self.preset, *(f"{key}={value}" for key, value in self.fields.items())])


TokensByRoutes = Mapping[Routes, PolicyLossInputs]
"""N learning tokens of a rollout as the policy of one checkpoint sees them, for each way of routing."""


def variants(base: Variant, presets: Sequence[str], sweeps: Mapping[str, Sequence[Value]]) -> list[Variant]:
    """Return the run's own variant, then each preset with each combination of the swept fields that it uses.

    Raises:
        ConfigError: A preset is unknown, none uses a swept field, or a value is out of range.
    """
    chosen = [Variant(name) for name in presets] or [base]
    usable = {variant.name: variant.objective.fields_in_use for variant in chosen}
    unused = [name for name in sweeps if not any(name in fields for fields in usable.values())]
    if unused:
        found = f"{', '.join(unused)} of {', '.join(usable)}"
        known = "one of " + ", ".join(sorted({name for fields in usable.values() for name in fields}))
        raise ConfigError(Problem("--sweep", found, known, "Sweep a field that one of the presets uses."))
    found = list(_swept(chosen, sweeps))
    for variant in found:
        _ = variant.objective  # raises where a value is out of range
    own = base.objective
    return [base, *(variant for variant in found if replace(variant.objective, name=own.name) != own)]


def _swept(chosen: Sequence[Variant], sweeps: Mapping[str, Sequence[Value]]) -> Iterator[Variant]:
    for variant in chosen:
        own = {name: values for name, values in sweeps.items() if name in variant.objective.fields_in_use}
        for values in itertools.product(*own.values()):
            yield Variant(variant.preset, {**variant.fields, **dict(zip(own, values, strict=True))})


def require_inputs(asked: Sequence[Variant], *, num_columns: int, has_old_log_probs: bool) -> None:
    """Refuse variants whose inputs the kept tokens lack, before any model loads.

    Raises:
        ConfigError: With every problem.
    """
    problems: list[Problem] = []
    for variant in asked:
        objective = variant.objective
        if objective.needs_topk and objective.top_k > num_columns:
            found = f"{variant.name}, which uses {objective.top_k} columns of the rollout's top-K"
            action = "Sweep a smaller top_k, or sample with a larger rollout.num_topk_log_probs."
            problems.append(Problem("--sweep", found, f"at most the {num_columns} that were kept", action))
        if objective.anchor == "recomputed" and not has_old_log_probs:
            found = f"{variant.name}, whose anchor is the trainer's policy before the steps"
            action = "Give the checkpoint that the rollout was sampled with as --before."
            problems.append(Problem("--before", found, "that policy's weights", action))
    if problems:
        raise ConfigError(problems)


def evaluate_variants(asked: Sequence[Variant], tokens: TokensByRoutes) -> list[dict[str, Any]]:
    """Evaluate the masks: one row for each variant and way of routing; the first variant is the run's own.

    Fractions are over tokens with A > 0, A < 0, or either. `agreement` is the share of learning tokens on which
    the mask is that of the first variant with the same routes. `dropped_mass_fraction` is the sum of
    min(r, C) |A| over masked tokens, of its sum over all. `rollout_prob_masked` is the mean of mu over masked
    tokens. `divergence_p999` leaves infinite divergences out.
    """
    rows: list[dict[str, Any]] = []
    for routes, inputs in tokens.items():
        own: Tensor | None = None
        for variant in asked:
            out = policy_loss(variant.objective, inputs)
            own = out.mask if own is None else own
            row: dict[str, Any] = {"variant": variant.name, "preset": variant.preset, **variant.fields}
            rows.append(row | {"routes": routes} | _figures(variant.objective, out, inputs, own))
    return rows


def _figures(objective: Objective, out: Any, tokens: PolicyLossInputs, own_mask: Tensor) -> dict[str, float]:
    masked, advantages = ~out.mask & (tokens.advantages != 0), tokens.advantages
    mass = (out.ratio.clamp(max=objective.ratio_cap) * advantages.abs()).double()
    finite = out.divergence[out.divergence.isfinite()]
    return {
        "masked_fraction": _share(masked, advantages != 0),
        "masked_fraction_positive": _share(masked, advantages > 0),
        "masked_fraction_negative": _share(masked, advantages < 0),
        "agreement": float((out.mask == own_mask).double().mean()),
        "dropped_mass_fraction": float(mass[masked].sum() / mass.sum().clamp(min=1e-300)),
        "rollout_prob_masked": float(tokens.rollout_log_probs[masked].double().exp().mean()),
        "divergence_p999": float(np.percentile(finite.numpy(), 99.9)) if finite.numel() else float("nan"),
    }


def _share(part: Tensor, whole: Tensor) -> float:
    return int((part & whole).sum()) / int(whole.sum()) if bool(whole.any()) else float("nan")


def mismatch_by_routes(tokens: TokensByRoutes) -> dict[Routes, dict[str, float]]:
    """Return the distance of pi from mu, as a run reports it, for each way of routing."""
    found: dict[Routes, dict[str, float]] = {}
    for routes, inputs in tokens.items():
        metrics, is_learning = Metrics(), torch.ones_like(inputs.log_probs, dtype=torch.bool)
        add_mismatch(metrics, inputs.log_probs, inputs.rollout_log_probs, is_learning)
        found[routes] = {name.removeprefix("mismatch/"): value for name, value in metrics.values().items()}
    return found
