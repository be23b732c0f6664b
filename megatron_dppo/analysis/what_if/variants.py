"""Computes the masks of other trust regions from log-probs alone."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, TopKLogProbs, policy_loss, preset
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
        """What judges the tokens."""
        return preset(self.preset, **self.fields)

    @property
    def name(self) -> str:
        """The preset, then its fields."""
        return " ".join([self.preset, *(f"{key}={value}" for key, value in self.fields.items())])


@dataclass(frozen=True, eq=False)
class JudgedTokens:
    """N learning tokens of a rollout, as the policy of one checkpoint sees them."""

    log_probs: Mapping[Routes, Tensor]  # [N] float32 log pi, for each way of routing
    rollout_log_probs: Tensor  # [N] float32 log mu
    advantages: Tensor  # [N] float32
    targets: Tensor  # [N] int64
    old_log_probs: Mapping[Routes, Tensor] = field(default_factory=dict[Routes, Tensor])  # [N] log pi'
    topk_ids: Tensor | None = None  # [N, K] int32
    topk_rollout_log_probs: Tensor | None = None  # [N, K] float32
    topk_log_probs: Mapping[Routes, Tensor] = field(default_factory=dict[Routes, Tensor])  # [N, K] float32

    @property
    def num_columns(self) -> int:
        """K, 0 where the rollout kept none."""
        return 0 if self.topk_ids is None else self.topk_ids.shape[1]

    def inputs(self, routes: Routes) -> PolicyLossInputs:
        """What the loss takes."""
        topk = None
        if self.topk_ids is not None and self.topk_rollout_log_probs is not None:
            topk = TopKLogProbs(self.topk_ids, self.topk_rollout_log_probs, self.topk_log_probs[routes])
        return PolicyLossInputs(
            log_probs=self.log_probs[routes],
            rollout_log_probs=self.rollout_log_probs,
            advantages=self.advantages,
            old_log_probs=self.old_log_probs.get(routes),
            topk=topk,
            targets=self.targets,
        )


def variants(base: Variant, presets: Sequence[str], sweeps: Mapping[str, Sequence[Value]]) -> list[Variant]:
    """The run's own variant, then each preset with each combination of the swept fields that it uses.

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


def require_inputs(judged: Sequence[Variant], *, num_columns: int, has_old_log_probs: bool) -> None:
    """Refuse variants that the kept tokens cannot serve, before any model loads.

    Raises:
        ConfigError: With every problem.
    """
    problems: list[Problem] = []
    for variant in judged:
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


def judge(judged: Sequence[Variant], tokens: JudgedTokens) -> list[dict[str, Any]]:
    """One row for each variant and way of routing; the first variant is the run's own.

    Fractions are over tokens with A > 0, A < 0, or either. `agreement` is the share of learning tokens on which
    the mask is that of the first variant with the same routes. `dropped_mass_fraction` is the sum of
    min(r, C) |A| over masked tokens, of its sum over all. `rollout_prob_masked` is the mean of mu over masked
    tokens. `divergence_p999` leaves infinite divergences out.
    """
    rows: list[dict[str, Any]] = []
    for routes in tokens.log_probs:
        own: Tensor | None = None
        for variant in judged:
            out = policy_loss(variant.objective, tokens.inputs(routes))
            own = out.mask if own is None else own
            row: dict[str, Any] = {"variant": variant.name, "preset": variant.preset, **variant.fields}
            rows.append(row | {"routes": routes} | _figures(variant.objective, out, tokens, own))
    return rows


def _figures(objective: Objective, out: Any, tokens: JudgedTokens, own_mask: Tensor) -> dict[str, float]:
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


def mismatch_by_routes(tokens: JudgedTokens) -> dict[Routes, dict[str, float]]:
    """The distance of pi from mu, as a run reports it, for each way of routing."""
    found: dict[Routes, dict[str, float]] = {}
    for routes, log_probs in tokens.log_probs.items():
        metrics = Metrics()
        add_mismatch(metrics, log_probs, tokens.rollout_log_probs, torch.ones_like(log_probs, dtype=torch.bool))
        found[routes] = {name.removeprefix("mismatch/"): value for name, value in metrics.values().items()}
    return found
