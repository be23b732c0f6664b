"""Attributes the mismatch to its sources: engines, routing, age of weights, and training itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_dppo.analysis.lines import Points, finite_mean, over_rollouts, points_of
from megatron_dppo.analysis.report.plots import Panel, Section, by_mini_step, place_in_rollout
from megatron_dppo.analysis.report.summary import format_number
from megatron_dppo.run_folder.reader import MetricsRow, Run

_COLUMNS = {
    "abs_prob_diff_mean": "|π − μ|",
    "tv_p50": "p50",
    "tv_p99": "p99",
    "tv_p999": "p99.9",
    "kl_k1": "k1 KL",
    "kl_k3": "k3 KL",
    "ratio_min": "π/μ min",
    "ratio_p001": "p0.1",
    "ratio_p999": "p99.9",
    "ratio_max": "max",
}
_AGE = re.compile(r"mismatch_age_(\d+)/kl_k3$")
_TICKS = ("engines", "engines +<br>routing", "before<br>the steps", "after<br>the steps")


@dataclass(frozen=True)
class Source:
    """A source of the mismatch, with the rows and the prefix of the metrics that measure it."""

    label: str
    prefix: str
    rows: Sequence[MetricsRow]

    def values(self, name: str) -> list[float]:
        """Return the metric of all rows that have it."""
        return [row.values[metric] for row in self.rows if (metric := f"{self.prefix}/{name}") in row.values]

    def summary(self, name: str) -> float | None:
        """Return the mean of the finite values; the extreme of `ratio_min` and `ratio_max`; the token sum."""
        values = self.values(name)
        whole = {"ratio_min": min, "ratio_max": max, "num_tokens": sum}.get(name)
        return finite_mean(values) if whole is None or not values else finite_mean([whole(values)])


def mismatch_sections(runs: Sequence[Run]) -> list[Section]:
    """Return cards of the sources, of drift by mini-step, and of age where tokens have several ages."""
    if not any("drift/kl_k3" in row.values for run in runs for row in run.steps):
        return []
    staleness = Section(
        "staleness",
        "Mismatch by age of the weights",
        "Before the first gradient step, by the weight versions between a token's sampling and its training: "
        "age 0 is the engines alone, and the rise after it is the price of responses begun with older weights.",
        (Panel("k3 KL", ("mismatch_age_<n>/kl_k3",), x_title="age in versions", points=by_age, log=True),),
    )
    has_ages = any(len(_ages(run)) > 1 for run in runs)
    sources = _SOURCES if any(map(has_routes, runs)) else _SOURCES_WITHOUT_ROUTES
    return [sources, _drift(runs), *([staleness] if has_ages else [])]


def _drift(runs: Sequence[Run]) -> Section:
    known = {name for run in runs for row in run.steps for name in row.values}
    return Section(
        "drift",
        "Drift by mini-step",
        "How far π stands from μ at each gradient step of a rollout, mean over the run: at 0 it has the "
        "weights that sampled, and the rise after it is what the steps themselves add.",
        tuple(
            Panel(title, (metric,), x_title="gradient step", points=by_mini_step, log=True)
            for metric, title in _DRIFT.items()
            if metric in known
        ),
    )


def by_source(run: Run, _metric: str) -> Points:
    """Return the mean k3 KL of each source, x counting `_TICKS`."""
    steps = _steps_by_place(run)
    of_ticks = (
        Source("", "mismatch_replayed", run.rollouts),
        Source("", "mismatch_live", run.rollouts),
        Source("", "mismatch", run.rollouts),
        Source("", "drift", steps[max(steps)] if max(steps, default=0) else ()),
    )
    means = [source.summary("kl_k3") for source in of_ticks]
    return points_of(enumerate(means))


def by_source_without_routes(run: Run, metric: str) -> Points:
    """Return the last two sources of `by_source`, x counting from 0."""
    x, y = by_source(run, metric)
    kept = [(place - 2, value) for place, value in zip(x, y, strict=True) if place >= 2]
    return points_of(kept)


def has_routes(run: Run) -> bool:
    """Whether the run captured the rollout's experts, so that routing is a question; never of a dense model."""
    return run.option("rollout.routing_replay") not in (None, "off") or any(
        name.startswith(("routing/", "mismatch_live/")) for row in run.rollouts for name in row.values
    )


def by_age(run: Run, _metric: str) -> Points:
    """Return the mean k3 KL of the tokens of each age."""
    means = {age: finite_mean(over_rollouts(run, f"mismatch_age_{age}/kl_k3")[1]) for age in _ages(run)}
    return points_of(means.items())


_SOURCES = Section(
    "mismatch-sources",
    "Where the mismatch comes from",
    "The two engines on the rollout's experts; with the trainer's own routers; then what was trained on, "
    "before the first and at the last gradient step of a rollout: work on the bar that adds most to the last.",
    (
        Panel(
            "k3 KL, mean over rollouts",
            ("mismatch/kl_k3", "mismatch_live/kl_k3", "mismatch_replayed/kl_k3"),
            x_title="",
            points=by_source,
            bars=True,
            bar_labels=_TICKS,
        ),
    ),
)
_SOURCES_WITHOUT_ROUTES = replace(
    _SOURCES,
    reading="The mismatch in training: before a rollout's first gradient step, when only the engines differ, "
    "and at its last step. Work on the bar that adds most.",
    panels=(
        replace(
            _SOURCES.panels[0],
            metrics=("mismatch/kl_k3",),
            points=by_source_without_routes,
            bar_labels=_TICKS[2:],
        ),
    ),
)
_DRIFT = {
    "drift/kl_k3": "k3 KL",
    "drift/tv_p999": "|π − μ|, 99.9th percentile",
    "drift/topk_tv_p999": "Top-K total variation, 99.9th percentile",
}


def mismatch_tables(runs: Sequence[Run]) -> dict[str, object] | None:
    """Return each run's table of sources and the cost of the extra forwards, or `None` without any."""
    if not mismatch_sections(runs):
        return None
    tables = [[_table_row(source) for source in _sources(run) if source.values("kl_k3")] for run in runs]
    return {
        "columns": [*_COLUMNS.values(), "tokens"],
        "runs": [{"rows": rows, "cost": _cost(run)} for run, rows in zip(runs, tables, strict=True)],
    }


def _sources(run: Run) -> list[Source]:
    """Return the sources in the table's order; drift at a rollout's first, second and last gradient step."""
    ages, steps = _ages(run), _steps_by_place(run)
    return [
        Source("engines: replayed routes", "mismatch_replayed", run.rollouts),
        Source("engines and routing: live routes", "mismatch_live", run.rollouts),
        Source("as trained, before the first step", "mismatch", run.rollouts),
        *(Source(f"of these, weights of age {age}", f"mismatch_age_{age}", run.rollouts) for age in ages),
        *(
            Source(f"after {place} gradient step{'s' if place > 1 else ''}", "drift", steps[place])
            for place in sorted({1, max(steps, default=0)} & steps.keys() - {0})
        ),
    ]


def _table_row(source: Source) -> dict[str, object]:
    numbers = [format_number(source.summary(name), "number") for name in _COLUMNS]
    return {"label": source.label, "cells": [*numbers, format_number(source.summary("num_tokens"), "count")]}


def _cost(run: Run) -> str:
    """Return a sentence on the cost of the paired forward, or an empty one without it."""
    seconds = ("time/paired_forward_s", "time/total_s")
    rows = [row.values for row in run.rollouts if all(name in row.values for name in seconds)]
    if not rows:
        return ""
    paired, total = (finite_mean(row[name] for row in rows) for name in seconds)
    if not paired or not total:
        return ""
    return (
        f"The paired forward took {paired:.3g} s, {paired / total:.1%} of the time of a rollout that has one."
    )


def _ages(run: Run) -> list[int]:
    names = {name for row in run.rollouts for name in row.values}
    return sorted(int(found[1]) for name in names if (found := _AGE.match(name)))


def _steps_by_place(run: Run) -> Mapping[int, list[MetricsRow]]:
    """Return step rows by their place in their rollout."""
    found: dict[int, list[MetricsRow]] = {}
    for place, row in place_in_rollout(run):
        found.setdefault(place, []).append(row)
    return found
