"""Lines of the report and of the figures: their runs, names, points, smoothing, means and intervals.

Runs with equal settings differ only in their seed, and are one line. The report draws every run of a line in
one colour. The figures draw the mean of a line's seeds with its interval.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from megatron_dppo.analysis.contrasts import mean_intervals
from megatron_dppo.config.load import flat, shown
from megatron_dppo.run_folder.reader import Run

Points = tuple[list[float], list[float]]  # rollouts, and a value for each

R3 = "rollout.routing_replay"
SIGMA = 2.0  # points, of the smoothing's Gaussian kernel
MIN_POINTS = 10  # shorter curves are not smoothed
LONGEST_NAME = 40  # characters; longer names give way to the folder's
WITHOUT_EFFECT = (  # settings that change nothing that is learnt, except by chance
    *("run.folder", "run.seed", "run.num_threads", "versions.host"),
    *("tracking.", "checkpoint.", "evaluation."),
)
_SEED = re.compile(r"[/_., -]*(seed)?[/_. -]*\d+$")


@dataclass(frozen=True)
class Line:
    """Runs that differ only in their seed."""

    label: str
    places: tuple[int, ...]  # indices of the line's runs
    by_seed: Mapping[str, Run]  # the later of two runs with one seed


def seed_of(run: Run) -> str:
    """Return `run.seed` as text."""
    return shown(run.option("run.seed"))


def experiment_of(run: Run) -> dict[str, Any]:
    """Return the settings that distinguish lines; the planned length does only if the learning rate decays."""
    own = {key: value for key, value in flat(run.config).items() if not key.startswith(WITHOUT_EFFECT)}
    if run.option("optimizer.schedule") in (None, "constant"):
        own.pop("run.num_rollouts", None)
    return own


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values, as text, are not the same in all settings."""
    keys = sorted({key for own in settings for key in own})
    return [key for key in keys if len({shown(own.get(key)) for own in settings}) > 1]


def changed_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings on which lines of these runs differ."""
    return differing_keys([experiment_of(run) for run in runs])


def places_of_equal(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of equal settings, group by group, in the order in which groups begin."""
    groups: dict[str, list[int]] = {}
    for index, own in enumerate(settings):
        groups.setdefault(repr(sorted(own.items())), []).append(index)
    return list(groups.values())


def lines_of(runs: Sequence[Run], names: Sequence[str], longest: float = LONGEST_NAME) -> list[Line]:
    """Return the lines in their runs' order, named by what differs, else by their runs without seeds.

    Args:
        runs: Runs.
        names: Their names.
        longest: Most characters of a label that lists what differs.
    """
    settings = [experiment_of(run) for run in runs]
    groups, labels = places_of_equal(settings), setting_labels(settings, longest)
    if len(groups) == 1:
        found = ["all runs"]
    elif labels is not None:
        found = [labels[places[0]] for places in groups]
    else:
        common = [{_SEED.sub("", names[place]) for place in places} - {""} for places in groups]
        found = [own.pop() if len(own) == 1 else "" for own in common]
        is_distinct = all(found) and len(set(found)) == len(found)
        found = [
            name if is_distinct and len(places) > 1 else names[places[0]]
            for name, places in zip(found, groups, strict=True)
        ]
    return [
        Line(label, tuple(places), {seed_of(runs[place]): runs[place] for place in places})
        for label, places in zip(found, groups, strict=True)
    ]


def folder_names(runs: Sequence[Run]) -> list[str]:
    """Return the folders' names, with as much of the path before them as makes them distinct."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return distinct names: the setting that differs, if it is one, with seeds, else the folders' names."""
    folders = folder_names(runs)
    settings = [experiment_of(run) for run in runs]
    labels = setting_labels(settings)
    if len(runs) == 1 or len(differing_keys(settings)) > 1 or labels is None:
        return folders
    repeated = {place for group in places_of_equal(settings) if len(group) > 1 for place in group}
    seeds = [f"seed {seed_of(run)}" if place in repeated else "" for place, run in enumerate(runs)]
    names = [", ".join(filter(None, parts)) for parts in zip(labels, seeds, strict=True)]
    return names if len(set(names)) == len(names) else folders


def setting_labels(settings: Sequence[Mapping[str, Any]], longest: float = LONGEST_NAME) -> list[str] | None:
    """Return the values of the settings that differ, in words; empty if none does, None if they are longer."""
    keys = differing_keys(settings)
    if not keys:
        return ["" for _ in settings]
    last = Counter(key.rpartition(".")[2] for key in keys)
    columns: list[list[str]] = []
    for key in keys:
        values = [own.get(key) for own in settings]
        name = key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2]
        columns.append([_r3(value, values) if key == R3 else _label(name, value) for value in values])
    labels = [", ".join(parts) for parts in zip(*columns, strict=True)]
    different = {tuple(shown(own.get(key)) for key in keys) for own in settings}
    is_distinct = len(set(labels)) == len(different)
    return labels if is_distinct and max(map(len, labels)) <= longest else None


def _r3(value: Any, values: Sequence[Any]) -> str:
    """Return "R3 on" or "R3 off", with the value if runs differ in how routes are captured."""
    if value == "replay":
        return "R3 on"
    without = {shown(other) for other in values if other != "replay"}
    return "R3 off" if len(without) == 1 else f"R3 off ({shown(value)})"


def _label(key: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else shown(value)
    return text if key == "preset" and value is not None else f"{key} {text}"


def over_rollouts(run: Run, metric: str) -> Points:
    """Return the metric by rollout, from rollout rows; else the mean of each rollout's gradient steps.

    Rollouts count from 1, as in the log; an evaluation is at the number of rollouts before it.
    """
    rows = [(row.rollout + 1.0, row.values) for row in run.rollouts]
    rows += [(float(row.rollout), row.values) for row in run.evaluations]
    if found := [(rollout, values[metric]) for rollout, values in rows if metric in values]:
        return points_of(found)
    of_rollout: dict[int, list[float]] = {}
    for row in run.steps:
        if metric in row.values:
            of_rollout.setdefault(row.rollout, []).append(row.values[metric])
    return points_of((rollout + 1, fmean(values)) for rollout, values in of_rollout.items())


def points_of(values: Iterable[tuple[float, float | None]]) -> Points:
    """Return the points (x, y) whose y is known."""
    known = [(float(x), y) for x, y in values if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def finite_mean(values: Iterable[float]) -> float | None:
    """Return the mean of the finite values, or `None` without any."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else None


def can_be_logarithmic(values: Iterable[float]) -> bool:
    """Return whether a logarithmic axis can show every finite value: a zero would silently vanish."""
    return min(filter(math.isfinite, values), default=0) > 0


@dataclass(frozen=True)
class Curve:
    """A metric of one line at P rollouts; values that are not finite are NaN."""

    x: np.ndarray  # [P] rollouts that all seeds have
    raw: np.ndarray  # [P] mean over seeds
    mean: np.ndarray  # [P] mean over seeds of the smoothed curves; equals `raw` if they are not smoothed
    low: np.ndarray | None  # [P] ends of the 95 % interval of `mean`; None for one seed
    high: np.ndarray | None
    num_seeds: int
    is_smoothed: bool


def curve_of(seeds: Sequence[Points], metric: str, *, is_log: bool = False) -> Curve | None:
    """Return the curve over the rollouts that all seeds have, or `None` without any.

    Curves of at least MIN_POINTS points are smoothed, except scores: an evaluation is a measurement by itself.

    Args:
        seeds: Points of each seed that has the metric.
        metric: Name of the metric.
        is_log: Whether the axis is logarithmic.
    """
    shared = sorted(set[float].intersection(*(set(x) for x, _ in seeds))) if seeds else []
    if not shared:
        return None
    by_rollout = [dict(zip(x, y, strict=True)) for x, y in seeds]
    values = np.asarray([[of[x] for x in shared] for of in by_rollout], dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    is_smoothed = len(shared) >= MIN_POINTS and not metric.startswith("eval/")
    seen = (
        np.asarray([smooth(row.tolist(), shared, is_log=is_log) for row in values]) if is_smoothed else values
    )
    low, high = mean_intervals(seen) if len(seeds) > 1 else (None, None)
    return Curve(np.asarray(shared), values.mean(axis=0), seen.mean(axis=0), low, high, len(seeds), is_smoothed)


def smooth(values: Sequence[float], x: Sequence[float] | None = None, *, is_log: bool = False) -> list[float]:
    """Smooth P values by local linear regression, within their range. Values that are not finite do not count.

    A level or a straight line stays as it is. A kernel's plain average bends both ends of a curve towards the
    middle, so that runs with one beginning seem to begin apart. The regression has no such bias (Fan and
    Gijbels, Local Polynomial Modelling, 1996, section 3.2).

    Args:
        values: [P], in the order of x.
        x: [P] positions, such as rollouts. `None` means 0, 1, 2, ... The kernel counts points, not distances.
        is_log: Smooth logarithms, as a logarithmic axis shows them; all values are positive.
    """
    known = np.asarray(values, dtype=np.float64)
    is_known = np.isfinite(known)
    if not is_known.any():
        return [float("nan")] * known.size
    y = np.where(is_known, known, 1.0)
    y = np.log(y) if is_log else y
    order = np.arange(known.size)
    places = np.asarray(order if x is None else x, dtype=np.float64)
    weights = np.exp(-0.5 * ((order[:, None] - order) / SIGMA) ** 2) * is_known  # [P, P], a row for each point
    distances = places - places[:, None]
    total, first, second = (np.sum(weights * distances**power, axis=1) for power in (0, 1, 2))
    determinant = total * second - first**2
    linear = second[:, None] - first[:, None] * distances  # [P, P]
    is_line = determinant > 1e-9 * total * second  # else fewer than two points are near
    factors = np.where(is_line[:, None], linear, 1.0) * weights
    sums = factors.sum(axis=1)
    mean = (factors @ y) / np.where(sums == 0, 1.0, sums)
    mean = np.clip(mean, y[is_known].min(), y[is_known].max())
    return np.where(sums == 0, np.nan, np.exp(mean) if is_log else mean).tolist()
