"""Reads folders as the material of figures: lines of runs that differ only in their seed, and token pairs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.own_rule import OWN_FIELDS, Own, OwnRule
from megatron_dppo.algorithms.presets import OVERRIDABLE
from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.style import LOOKS, labels_of, objective_label
from megatron_dppo.analysis.lines import (
    Points,
    experiment_of,
    folder_names,
    over_rollouts,
    places_of_equal,
    seed_of,
)
from megatron_dppo.analysis.token_files import list_files
from megatron_dppo.config.load import shown
from megatron_dppo.data.batches.batch_file import group_files, kept_rollouts, read_share
from megatron_dppo.errors import DataError
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
_NOT_OF_THE_EXPERIMENT = (  # settings that distinguish its lines, or that only record
    *(f"algorithm.{name}" for name in OBJECTIVE_FIELDS),
    "rollout.routing_replay",
    "rollout.num_topk_log_probs",
)
TOKENS = "tokens.jsonl"  # of megatron-dppo measure-mismatch
_SUFFIX = "_log_probs"
_MU = "rollout" + _SUFFIX
_ROUTES = {"live": "live routes", "replayed": "replayed routes (R3)"}


@dataclass(frozen=True)
class Material:
    """Contents of the named folders."""

    experiments: Sequence[Experiment]
    tokens: Sequence[TokenPairs]
    tokens_at: int | None = None  # rollout of the masked tokens, from 1; None means the last listed one
    is_mu_logarithmic: bool = False  # the axis of mu of single tokens

    @property
    def lines(self) -> list[AlgorithmLine]:
        """Lines of all experiments."""
        return [line for experiment in self.experiments for line in experiment.lines]


@dataclass(frozen=True)
class Lacking:
    """The reason why a figure is not drawn, and what to set."""

    found: str
    action: str


@dataclass(frozen=True)
class Kind:
    """One of the paper's figures, or one that completes them."""

    name: str
    paper: str  # its numbers in captions; empty without a counterpart
    draw: Callable[[Kind, Material], list[Drawing] | Lacking]
    needs_runs: bool = True  # False: drawn from formulas


def scores_of(lines: Sequence[AlgorithmLine]) -> list[str]:
    """Return the names of the evaluation scores that any of these lines has."""
    return sorted(
        {metric for line in lines for run in line.runs for metric in run.curves if SCORE.fullmatch(metric)}
    )


def has(lines: Sequence[AlgorithmLine], metric: str) -> bool:
    """Whether any of these lines has values of the metric."""
    return any(line.points(metric) for line in lines)


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
        return seed_of(self.run)

    @property
    def is_replayed(self) -> bool:
        """Whether the rollout's expert choices were replayed (R3)."""
        return self.run.option("rollout.routing_replay") == "replay"


@dataclass(frozen=True)
class AlgorithmLine:
    """Runs of one algorithm, with R3 or without, that differ only in their seed."""

    label: str
    objective: Objective
    is_replayed: bool
    runs: tuple[RunCurves, ...]  # each with another seed
    shade: int  # index of the objective among its preset's objectives, from 0
    left_out: tuple[str, ...] = ()  # names of runs that a later run with the same seed replaced
    own_place: int = 0  # index among the runs' rules without a row in the style table

    def points(self, metric: str) -> list[Points]:
        """Return the points of each seed that has the metric."""
        return [run.curves[metric] for run in self.runs if metric in run.curves]


@dataclass(frozen=True)
class Experiment:
    """Lines that differ only in the trust region and in R3."""

    label: str  # empty for a single experiment
    settings: str  # on which experiments differ, in words
    lines: tuple[AlgorithmLine, ...]


def read_curves(paths: Sequence[Path]) -> list[RunCurves]:
    """Read the runs of folders, under distinct names."""
    found: list[RunCurves] = []
    for path in paths:
        run = read_run(path)
        scores = {name for row in run.evaluations for name in row.values if SCORE.fullmatch(name)}
        points = {metric: over_rollouts(run, metric) for metric in (*METRICS, *sorted(scores))}
        points |= {curve: over_clipped_tokens(run, name) for curve, name in CLIPPED.items()}
        bare = replace(run, steps=(), rollouts=(), evaluations=())
        curves = {metric: known for metric, known in points.items() if known[0]}
        found.append(RunCurves(bare, path.name, objective_of(run), curves, list_files(run)))
    names = folder_names([each.run for each in found])
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
    return Own(name=name, divergence=divergence, function=rule, **fields)


def _not_imported(*_: object) -> Tensor:
    raise NotImplementedError("a figure names a user's rule, and never evaluates it")


def experiments_of(runs: Sequence[RunCurves]) -> list[Experiment]:
    """Return the experiments of these runs and the lines of each, in the runs' order.

    If two runs have the same settings and the same seed, the later one counts.
    """
    settings = [_settings(run) for run in runs]
    own_rules = sorted({run.objective.name for run in runs} - LOOKS.keys())
    members = places_of_equal(settings)
    labels = labels_of([settings[indices[0]] for indices in members])
    return [
        Experiment(label, words, tuple(_lines([runs[index] for index in indices], own_rules)))
        for indices, (label, words) in zip(members, labels, strict=True)
    ]


def _settings(run: RunCurves) -> dict[str, str]:
    """Return the settings that separate experiments, as text."""
    return {
        key: shown(value)
        for key, value in experiment_of(run.run).items()
        if key not in _NOT_OF_THE_EXPERIMENT and not key.startswith(_OF_OWN_RULES)
    }


def _place(objective: Objective, is_replayed: bool) -> tuple[object, ...]:
    """Return a legend's sort key: the order of the looks, whatever the order of the folders."""
    numbers = [v for f in fields(objective) if isinstance(v := getattr(objective, f.name), float)]
    place = list(LOOKS).index(objective.name) if objective.name in LOOKS else len(LOOKS)
    options = [(name, isinstance(value, str), value) for name, value in objective.rule_options.items()]
    return (place, objective.name, is_replayed, numbers, objective.divergence, options)


def _lines(runs: Sequence[RunCurves], own_rules: Sequence[str]) -> list[AlgorithmLine]:
    grouped: dict[tuple[Objective, bool], dict[str, RunCurves]] = {}
    for run in runs:
        grouped.setdefault((run.objective, run.is_replayed), {})[run.seed] = run
    shades: dict[str, list[Objective]] = {}
    lines: list[AlgorithmLine] = []
    for (objective, is_replayed), by_seed in sorted(grouped.items(), key=lambda item: _place(*item[0])):
        alike = [other for other, _ in grouped if other.name == objective.name]
        label = objective_label(objective, alike) + (" + R3" if is_replayed else "")
        seen = shades.setdefault(objective.name, [])
        seen += [] if objective in seen else [objective]
        shade, own = seen.index(objective), tuple(by_seed.values())
        names = [r.name for r in runs if (r.objective, r.is_replayed) == (objective, is_replayed)]
        left_out = tuple(name for name in names if name not in {run.name for run in own})
        own_place = own_rules.index(objective.name) if objective.name in own_rules else 0
        lines.append(AlgorithmLine(label, objective, is_replayed, own, shade, left_out, own_place))
    return lines


@dataclass(frozen=True)
class TokenPairs:
    """Log-probs of the same tokens in both engines, for one way of forwarding in the trainer."""

    folder: Path
    source: str  # in words
    log_mu: np.ndarray  # [T] float64
    log_pi: np.ndarray  # [T] float64, by the weights that sampled


def read_token_pairs(folder: Path) -> list[TokenPairs]:
    """Read the token pairs of a folder, or nothing if it has neither file."""
    if (folder / TOKENS).is_file():
        return _of_rows(folder)
    return _of_batches(folder)


def _of_rows(folder: Path) -> list[TokenPairs]:
    file = folder / TOKENS
    columns: dict[str, list[float]] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            for name, values in json.loads(line).items():
                if name.endswith(_SUFFIX):
                    columns.setdefault(name, []).extend(map(float, values))
        log_mu = columns.pop(_MU)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: found no rows of tokens ({error}); expected rollout_log_probs and live_log_probs of each "
            "response. Write it again with megatron-dppo measure-mismatch."
        ) from error
    return [
        _pairs(folder, _ROUTES.get(name.removesuffix(_SUFFIX), name), log_mu, log_pi)
        for name, log_pi in columns.items()
    ]


def _of_batches(run: Path) -> list[TokenPairs]:
    """Read the pairs of the newest kept rollout, which needs log-probs of a "recomputed" anchor."""
    if not (kept := [rollout for rollout in kept_rollouts(run / "batches") if _is_whole(run, rollout)]):
        return []
    log_mu: list[float] = []
    log_pi: list[float] = []
    for step in read_share(run / "batches", kept[-1], (0, 1)):
        for m in step.microbatches:
            if m.old_log_probs is None:
                return []
            log_mu += m.rollout_log_probs[m.loss_mask].tolist()
            log_pi += m.old_log_probs[m.loss_mask].tolist()
    return [_pairs(run, f"mini-batches of rollout {kept[-1]}", log_mu, log_pi)]


def _is_whole(run: Path, rollout: int) -> bool:
    """Whether each group has written its part, which groups of a live run may not have."""
    try:
        return bool(group_files(run / "batches", rollout))
    except DataError:
        return False


def _pairs(folder: Path, source: str, log_mu: list[float], log_pi: list[float]) -> TokenPairs:
    known = np.isfinite(log_mu) & np.isfinite(log_pi)
    return TokenPairs(folder, source, np.asarray(log_mu)[known], np.asarray(log_pi)[known])
