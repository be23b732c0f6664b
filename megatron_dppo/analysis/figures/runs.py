"""Reads run folders as lines of figures: runs that differ in their seed alone are one line of an experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import Tensor

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.objective import OWN_FIELDS
from megatron_dppo.algorithms.presets import OVERRIDABLE
from megatron_dppo.algorithms.trust_region import OwnRule
from megatron_dppo.analysis.figures.style import LOOKS, objective_label
from megatron_dppo.analysis.figures.titles import labels_of
from megatron_dppo.analysis.report.plots import Points, over_rollouts
from megatron_dppo.analysis.report.text import distinct_names, places_of_equal, settings_of
from megatron_dppo.analysis.token_files import listed_rollouts
from megatron_dppo.config.load import shown
from megatron_dppo.run_folder.reader import Run, read_run

METRICS = (
    "reward/mean",
    "rollout/response_length_mean",
    "policy/entropy",
    "mismatch/abs_prob_diff_mean",
    "mismatch/prob_diff_max",
    "mismatch/prob_diff_min",
    "trust_region/bad_update_fraction",
)
CLIPPED = {"clipped/mu_mean": "mu", "clipped/entropy_mean": "entropy"}  # curve -> mean of a step's row
SCORE = re.compile(r"eval/([^/]+)/avg_at_(\d+)")
OBJECTIVE_FIELDS = ("preset", *OVERRIDABLE)
_OF_OWN_RULES = "algorithm.rule_options."  # before each option
_NOT_OF_THE_EXPERIMENT = (  # what tells its lines apart, and what is only recorded
    *(f"algorithm.{name}" for name in OBJECTIVE_FIELDS),
    "rollout.routing_replay",
    "rollout.num_topk_log_probs",
)


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run without its rows: hundreds of runs fit in memory."""

    run: Run  # its rows are left out
    name: str
    objective: Objective
    curves: Mapping[str, Points]  # by metric: rollouts, and values as metrics.jsonl has them
    clipped: Mapping[int, tuple[Path, ...]]  # by rollout from 1, in order: its list of clipped tokens

    @property
    def seed(self) -> str:
        """`run.seed` as text."""
        return shown(self.run.option("run.seed"))

    @property
    def is_replayed(self) -> bool:
        """Whether the rollout's expert choices were replayed (R3)."""
        return self.run.option("rollout.routing_replay") == "replay"


@dataclass(frozen=True)
class Line:
    """Runs that differ in their seed alone."""

    label: str
    objective: Objective
    is_replayed: bool
    runs: tuple[RunCurves, ...]  # each with another seed
    shade: int  # index of the objective among its preset's objectives, from 0
    left_out: tuple[str, ...] = ()  # names of runs in whose place a later one of the same seed stands
    own_place: int = 0  # index of a custom rule among the custom rules of all runs


@dataclass(frozen=True)
class Experiment:
    """Lines whose runs differ in the trust region, in R3 and in their seeds, and in nothing else."""

    label: str  # empty for a single experiment
    settings: str  # on which experiments differ, in words
    lines: tuple[Line, ...]


def read_curves(paths: Sequence[Path]) -> list[RunCurves]:
    """Read the runs of folders, under distinct names.

    Raises:
        DataError: A folder is not a run folder.
        ConfigError: A run's [algorithm] is none that this version knows.
    """
    found: list[RunCurves] = []
    for path in paths:
        run = read_run(path)
        scores = {name for row in run.evaluations for name in row.values if SCORE.fullmatch(name)}
        points = {metric: over_rollouts(run, metric) for metric in (*METRICS, *sorted(scores))}
        points |= {curve: over_clipped_tokens(run, name) for curve, name in CLIPPED.items()}
        bare = replace(run, steps=(), rollouts=(), evaluations=())
        curves = {metric: known for metric, known in points.items() if known[0]}
        found.append(RunCurves(bare, path.name, objective_of(run), curves, listed_rollouts(run)))
    names = distinct_names([each.run for each in found])
    return [replace(each, name=name) for each, name in zip(found, names, strict=True)]


def over_clipped_tokens(run: Run, name: str) -> Points:
    """Return the mean of "mu" or "entropy" over all masked tokens of each rollout, of both signs of A.

    Each token of the rollout's gradient steps counts once: `clipped/num_tokens_*` weigh the means of the rows.
    A rollout without a masked token has no point.
    """
    sums: dict[int, float] = {}
    counts: dict[int, float] = {}
    for row in run.steps:
        for sign in ("positive", "negative"):
            count = row.values.get(f"clipped/num_tokens_{sign}", 0.0)
            mean = row.values.get(f"clipped/{name}_mean_{sign}")
            if count and mean is not None:
                sums[row.rollout] = sums.get(row.rollout, 0.0) + count * mean
                counts[row.rollout] = counts.get(row.rollout, 0.0) + count
    return [rollout + 1.0 for rollout in sums], [sums[rollout] / counts[rollout] for rollout in sums]


def objective_of(run: Run) -> Objective:
    """Return the objective that a run's config names; an own rule is not imported, and cannot be evaluated."""
    given = run.config.get("algorithm", {})
    name = given.get("preset", "dppo_binary_tv")
    overrides = {key: given[key] for key in OVERRIDABLE if key in given}
    if ":" not in name:
        return preset(name, **overrides)
    fields = {key: value for key, value in overrides.items() if key not in OWN_FIELDS}
    options = tuple(sorted(overrides.get("rule_options", {}).items()))
    rule = OwnRule(name, _not_imported, options, overrides.get("rule_over", "tokens"))
    divergence = overrides.get("rule_divergence", "binary_tv")
    return Objective(name, rule="own", divergence=divergence, own=rule, **fields)


def _not_imported(*_: object) -> Tensor:
    raise NotImplementedError("a figure names a user's rule, and never evaluates it")


def experiments_of(runs: Sequence[RunCurves]) -> list[Experiment]:
    """Return the experiments of these runs and the lines of each, in the runs' order.

    If two runs have the same settings and the same seed, the later one counts.
    """
    settings = [_settings(run) for run in runs]
    own_rules = sorted({run.objective.name for run in runs if run.objective.own is not None})
    members = places_of_equal(settings)
    labels = labels_of([settings[indices[0]] for indices in members])
    return [
        Experiment(label, words, tuple(_lines([runs[index] for index in indices], own_rules)))
        for indices, (label, words) in zip(members, labels, strict=True)
    ]


def _settings(run: RunCurves) -> dict[str, str]:
    """Return the settings that separate experiments; under a constant learning rate the length does not."""
    without = {*_NOT_OF_THE_EXPERIMENT}
    if run.run.option("optimizer.schedule") in (None, "constant"):
        without.add("run.num_rollouts")
    return {
        key: shown(value)
        for key, value in settings_of(run.run).items()
        if key not in without and not key.startswith(_OF_OWN_RULES)
    }


def _place(objective: Objective, is_replayed: bool) -> tuple[object, ...]:
    """Return a legend's sort key: the order of the looks, whatever the order of the folders."""
    numbers = [v for f in fields(Objective) if isinstance(v := getattr(objective, f.name), float)]
    place = list(LOOKS).index(objective.name) if objective.name in LOOKS else len(LOOKS)
    options = [(name, isinstance(value, str), value) for name, value in objective.rule_options.items()]
    return (place, objective.name, is_replayed, numbers, objective.divergence, options)


def _lines(runs: Sequence[RunCurves], own_rules: Sequence[str]) -> list[Line]:
    grouped: dict[tuple[Objective, bool], dict[str, RunCurves]] = {}
    for run in runs:
        grouped.setdefault((run.objective, run.is_replayed), {})[run.seed] = run
    shades: dict[str, list[Objective]] = {}
    lines: list[Line] = []
    for (objective, is_replayed), by_seed in sorted(grouped.items(), key=lambda item: _place(*item[0])):
        alike = [other for other, _ in grouped if other.name == objective.name]
        label = objective_label(objective, alike) + (" + R3" if is_replayed else "")
        seen = shades.setdefault(objective.name, [])
        seen += [] if objective in seen else [objective]
        shade, own = seen.index(objective), tuple(by_seed.values())
        names = [r.name for r in runs if (r.objective, r.is_replayed) == (objective, is_replayed)]
        left_out = tuple(name for name in names if name not in {run.name for run in own})
        own_place = own_rules.index(objective.name) if objective.own is not None else 0
        lines.append(Line(label, objective, is_replayed, own, shade, left_out, own_place))
    return lines
