"""Draws what the trainer did with its time, and what was sampled meanwhile.

A row has each phase's seconds but not its start, so phases are drawn in the loop's order: evaluation,
checkpoint, rollout, training, push. Time between rows (a start, a resume) is in no row, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from megatron_dppo.analysis.report.plots import Section, Trace, panel_title
from megatron_dppo.run_folder.reader import Run

Phase = Literal["evaluation", "checkpoint", "rollout", "train", "other", "push"]

WORDS: Mapping[Phase, str] = {
    "evaluation": "evaluating",
    "checkpoint": "saving a checkpoint",
    "rollout": "waiting for a rollout",
    "train": "training",
    "other": "other work",
    "push": "pushing weights",
}
"""What the trainer does, in the order in which a rollout goes through it."""

_TRAINING = ("time/batch_s", "time/paired_forward_s", "time/train_s")
_NEEDED = ("time/rollout_s", "time/train_s")
DETAILED = 20  # rollouts drawn over time; all of them are in the shares
BINS = 50  # bars of shares, whatever the run's length
MOST_RUNS = 4  # that are drawn; more runs have only the sentences
GENERATION, BUSY = "generation", "busy"  # names of two colours; each phase's colour has the phase's name
_TRAINER_LANE, _GENERATION_LANE, _THICK = 1, 0, 0.8
_LANES_HEIGHT, _SHARES_HEIGHT, _GAP = 110, 150, 78  # pixels
_LANE_AXIS = {
    "range": [-0.5, 1.5],
    "showgrid": False,
    "zeroline": False,
    "tickvals": [_GENERATION_LANE, _TRAINER_LANE],
    "ticktext": ["generation", "trainer"],
}
_SHARE_AXIS = {"range": [0, 100], "nticks": 6}
_MARGINS = {"l": 78, "r": 8, "t": 28, "b": 44}
SECTION = Section(
    "time-line",
    "Time line",
    f"What the trainer did over wall time, for the last {DETAILED} rollouts and, as shares, for the whole run. "
    "The bar of generation beneath is as thick as the share of the time with requests on their way; lines are "
    "pushes. If both lanes are full, generation overlaps with training; if they take turns, one waits "
    "for the other. Time between rows, as of a resume, is left out.",
)


@dataclass(frozen=True)
class Cycle:
    """Seconds of one rollout, from the evaluation before it to the push after it.

    Attributes:
        rollout: Its number, from 0.
        seconds: Seconds of each phase, in the order of `WORDS`.
        hold_s: Seconds of the push until no request was in flight.
        busy: Share of `training_s` with requests in flight, or `None` if not measured.
        requests: Mean number of requests over that time, or `None` if not measured.
        age_mean: Mean token staleness, in versions, or `None` if not measured.
        age_max: Staleness of the oldest token.
    """

    rollout: int
    seconds: Mapping[Phase, float]
    hold_s: float
    busy: float | None
    requests: float | None
    age_mean: float | None
    age_max: float | None

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def training_s(self) -> float:
        """Seconds from taking the rollout to the push, in which servers may sample the next ones."""
        return self.seconds["train"] + self.seconds["other"]


def cycles(run: Run) -> list[Cycle]:
    """Return the run's rollouts in order, with an evaluation after the last; empty without seconds in rows."""
    evaluated = {row.rollout: _seconds(row.values, "time/evaluation_s") for row in run.evaluations}
    is_ahead = bool(run.option("rollout.max_staleness"))
    is_saving_inside = bool(run.option("checkpoint.every_steps"))
    found = [
        _cycle(row.rollout, row.values, evaluated.pop(row.rollout, 0.0), is_ahead, is_saving_inside)
        for row in run.rollouts
        if all(name in row.values for name in _NEEDED)
    ]
    last = found[-1].rollout if found else math.inf
    return found + [_cycle(at, {}, seconds, is_ahead, False) for at, seconds in evaluated.items() if at > last]


def _cycle(
    rollout: int, row: Mapping[str, float], evaluation_s: float, is_ahead: bool, is_saving_inside: bool
) -> Cycle:
    rollout_s, push_s = _seconds(row, "time/rollout_s"), _seconds(row, "time/sync_s")
    train_s, save_s = sum(_seconds(row, name) for name in _TRAINING), _seconds(row, "time/save_s")
    other_s = max(_seconds(row, "time/total_s") - rollout_s - train_s - push_s, 0.0)
    if is_saving_inside and save_s <= other_s:  # between two gradient steps, which the total holds
        other_s -= save_s
    return Cycle(
        rollout,
        {
            "evaluation": evaluation_s,
            "checkpoint": save_s,
            "rollout": rollout_s,
            "train": train_s,
            "other": other_s,
            "push": push_s,
        },
        hold_s=min(_seconds(row, "sync/hold_s"), push_s),
        busy=_finite(row, "engine/busy_in_training") if is_ahead else 0.0,
        requests=_finite(row, "engine/requests_in_training"),
        age_mean=_finite(row, "rollout/staleness_mean"),
        age_max=_finite(row, "rollout/staleness_max"),
    )


def _seconds(row: Mapping[str, float], name: str) -> float:
    value = _finite(row, name)
    return 0.0 if value is None else max(value, 0.0)


def _finite(row: Mapping[str, float], name: str) -> float | None:
    value = row.get(name, math.nan)
    return value if math.isfinite(value) else None


def shares(of: Sequence[Cycle]) -> dict[Phase, float]:
    """Return the share of each phase in the time of all cycles, or nothing if they took no time."""
    total = sum(cycle.total_s for cycle in of)
    if not total:
        return {}
    return {phase: sum(cycle.seconds[phase] for cycle in of) / total for phase in WORDS}


def busy_in_training(of: Sequence[Cycle]) -> float | None:
    """Return the share of training's time with requests in flight, or `None` if it was not measured."""
    return _mean((cycle.busy, cycle.training_s) for cycle in of)


def hidden_share(of: Sequence[Cycle]) -> float | None:
    """Return the share of generation's time that overlapped training, or `None` if unknown."""
    known = [cycle for cycle in of if cycle.busy is not None]
    overlapping = sum(cycle.busy * cycle.training_s for cycle in known if cycle.busy is not None)
    waited = sum(cycle.seconds["rollout"] for cycle in known)
    return overlapping / (overlapping + waited) if overlapping + waited else None


def sentence(run: Run) -> str:
    """Return in words the shares of the trainer's time, staleness and overlap; empty without seconds."""
    found = cycles(run)
    of = shares(found)
    if not of:
        return ""
    hold = sum(cycle.hold_s for cycle in found) / sum(cycle.total_s for cycle in found)
    texts = {phase: f"{_percent(share)} {WORDS[phase]}" for phase, share in of.items() if share >= 0.0005}
    if "other" in texts:
        texts["other"] = f"{_percent(of['other'])} on {WORDS['other']}"
    if hold >= 0.0005 and "push" in texts:
        texts["push"] += f" ({_percent(hold)} until nothing was on its way)"
    order: tuple[Phase, ...] = ("train", "rollout", "push", "evaluation", "checkpoint", "other")
    first, *others = [texts[phase] for phase in order if phase in texts]
    parts = [f"The trainer spent {_enumerate([first.replace(' %', ' % of its time', 1), *others])}."]
    mean = _mean((cycle.age_mean, 1.0) for cycle in found)
    largest = max((cycle.age_max for cycle in found if cycle.age_max is not None), default=None)
    if mean is not None and largest is not None:
        parts.append(f"Tokens were {mean:.2g} versions old in the mean, {largest:.0f} at most.")
    return " ".join([*parts, _overlap(run, found)])


def _overlap(run: Run, found: Sequence[Cycle]) -> str:
    if not run.option("rollout.max_staleness"):
        return "Generation and training took turns (rollout.max_staleness = 0)."
    busy, share = busy_in_training(found), hidden_share(found)
    if busy is None or share is None:
        return "How much generation overlapped training is not in its rows."
    requests = _mean((cycle.requests, cycle.training_s) for cycle in found)
    number = "" if requests is None else f", {requests:.3g} in the mean"
    return (
        f"Servers had requests on their way for {_percent(busy)} of training{number}: {_percent(share)} of "
        "generation's time was hidden behind it."
    )


def why_absent(run: Run) -> str:
    """Return why a run has no time line, or an empty text if it has one."""
    if cycles(run):
        return ""
    if not run.rollouts:
        return "the run has no finished rollout yet"
    return "its rows in metrics.jsonl have no time/rollout_s and time/train_s"


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def _enumerate(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def time_line(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the section for the page: figure, words and legend, or `None` if no run has seconds."""
    texts = [sentence(run) for run in runs]
    if not any(texts):
        return None
    missing = [
        f"{name}: no time line: {why}."
        for run, name in zip(runs, names, strict=True)
        if (why := why_absent(run))
    ]
    drawn = [cycles(run) if len(runs) <= MOST_RUNS else [] for run in runs]
    seen = {phase for of in drawn for cycle in of for phase in WORDS if cycle.seconds[phase]}
    words = [{"colour": phase, "text": text} for phase, text in WORDS.items() if phase in seen]
    alone = len(runs) == 1
    others = [{"colour": GENERATION, "text": "servers sampling"}]
    if any(cycle.busy for of in drawn for cycle in of):
        others.append({"colour": BUSY, "text": "line: share of training with requests on their way"})
    return {
        "figure": figure(drawn, names),
        "texts": [text if alone else f"{n}: {text}" for n, text in zip(names, texts, strict=True) if text],
        "legend": [*words, *others] if seen else [],
        "missing": missing,
    }


def figure(drawn: Sequence[Sequence[Cycle]], names: Sequence[str]) -> dict[str, Any] | None:
    """Return a plotly figure of two panels for each run that has cycles; None without any."""
    having = [(index, of) for index, of in enumerate(drawn) if of]
    if not having:
        return None
    heights = [_LANES_HEIGHT, _SHARES_HEIGHT] * len(having)
    inner = sum(heights) + _GAP * (len(heights) - 1)
    layout: dict[str, Any] = {
        "height": inner + _MARGINS["t"] + _MARGINS["b"],
        "margin": _MARGINS,
        "hovermode": "closest",
        "barmode": "stack",  # bars with an explicit base start there
        "bargap": 0,
        "annotations": [],
        "shapes": [],
    }
    data: list[Trace] = []
    top = float(inner)
    for panel, height in enumerate(heights):
        index, of = having[panel // 2]
        is_lanes, axis = panel % 2 == 0, "" if panel == 0 else str(panel + 1)
        domain = (max((top - height) / inner, 0.0), top / inner)
        who = "" if len(drawn) == 1 else f"{names[index]}: "
        last = of[-DETAILED:]
        traces = list(_lanes(last) if is_lanes else _bars_of_shares(of))
        data += [{**trace, "meta": index, "xaxis": f"x{axis}", "yaxis": f"y{axis}"} for trace in traces]
        title = f"last {len(last)} rollouts" if is_lanes else "% of the time, whole run"
        x_title = {"text": "seconds" if is_lanes else "rollout", "font": {"size": 12}, "standoff": 6}
        layout[f"xaxis{axis}"] = {"anchor": f"y{axis}", "title": x_title, "nticks": 9, "zeroline": False}
        y_axis = _LANE_AXIS if is_lanes else _SHARE_AXIS
        layout[f"yaxis{axis}"] = {"anchor": f"x{axis}", "domain": list(domain), **y_axis}
        layout["annotations"].append(panel_title(f"{who}{title}", domain[1]))
        top -= height + _GAP
    return {"data": data, "layout": layout}


def _lanes(of: Sequence[Cycle]) -> Iterator[Trace]:
    """Yield the trainer's phases as bars over time, generation beneath, and the pushes."""
    starts = _starts(of)
    for phase in WORDS:
        bars = [(at[phase], cycle.seconds[phase], cycle) for at, cycle in zip(starts, of, strict=True)]
        if any(seconds for _, seconds, _ in bars):
            yield _lane(WORDS[phase], phase, _TRAINER_LANE, bars, lambda _: 1.0)
    sampled: list[tuple[float, float, Cycle]] = []
    overlapping: list[tuple[float, float, Cycle]] = []
    for at, cycle in zip(starts, of, strict=True):
        sampled += [(at[phase], cycle.seconds[phase], cycle) for phase in ("evaluation", "rollout")]
        overlapping.append((at["train"], cycle.training_s, cycle))
    yield _lane("sampling", GENERATION, _GENERATION_LANE, sampled, lambda _: 1.0)
    if any(cycle.busy for cycle in of):
        name = "sampling during training, %{customdata[1]}"
        yield _lane(name, GENERATION, _GENERATION_LANE, overlapping, lambda cycle: cycle.busy or 0.0)
    ends = [at["push"] + cycle.seconds["push"] for at, cycle in zip(starts, of, strict=True)]
    pushes = [end for end, cycle in zip(ends, of, strict=True) if cycle.seconds["push"]]
    yield {
        "type": "scatter",
        "name": "push",
        "legendgroup": "phase-push",
        "mode": "lines",
        "x": [x for end in pushes for x in (_short(end), _short(end), None)],
        "y": [y for _ in pushes for y in (-0.5, 1.5, None)],
        "line": {"width": 1},
        "hoverinfo": "skip",
    }


def _starts(of: Sequence[Cycle]) -> list[dict[Phase, float]]:
    """Return when each phase of each cycle begins, in seconds after the first."""
    times = accumulate((cycle.seconds[phase] for cycle in of for phase in WORDS), initial=0.0)
    return [dict(zip(WORDS, times, strict=False)) for _ in of]


def _lane(
    name: str,
    colour: str,
    lane: int,
    bars: Sequence[tuple[float, float, Cycle]],
    share: Callable[[Cycle], float],
) -> Trace:
    """Return bars of (start, seconds) in a lane, as thick as the share."""
    shown = [(start, seconds, cycle) for start, seconds, cycle in bars if seconds and share(cycle)]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name.partition(",")[0],
        "legendgroup": f"phase-{colour}",
        "base": [_short(start) for start, _, _ in shown],
        "x": [_short(seconds) for _, seconds, _ in shown],
        "y": [lane] * len(shown),
        "width": [_short(_THICK * share(cycle)) for _, _, cycle in shown],
        "customdata": [[cycle.rollout + 1, _load(cycle), _short(seconds)] for _, seconds, cycle in shown],
        "marker": {"line": {"width": 0}},
        "hovertemplate": f"rollout %{{customdata[0]}}: {name}, %{{customdata[2]}} s<extra></extra>",
    }


def _load(cycle: Cycle) -> str:
    busy = "" if cycle.busy is None else f"{cycle.busy:.0%} of its time"
    return busy if cycle.requests is None else f"{busy}, {cycle.requests:.3g} requests"


def _bars_of_shares(of: Sequence[Cycle]) -> Iterator[Trace]:
    """Yield each phase's share of the time as a stack of bars over rollouts, and servers' share of training."""
    length = max(-(-len(of) // BINS), 1)  # of successive cycles in one bar
    bins = [of[start : start + length] for start in range(0, len(of), length)]
    places = [(part[0].rollout + part[-1].rollout) / 2 + 1 for part in bins]
    widths = [part[-1].rollout - part[0].rollout + 1 for part in bins]
    stacks = [shares(part) for part in bins]
    for phase, words in WORDS.items():
        values = [100 * stack.get(phase, 0.0) for stack in stacks]
        if any(values):
            yield {
                "type": "bar",
                "name": words,
                "legendgroup": f"phase-{phase}",
                "x": places,
                "y": [_short(value) for value in values],
                "width": widths,
                "marker": {"line": {"width": 0}},
                "hovertemplate": f"rollout %{{x}}: {words} %{{y:.3g}} %<extra></extra>",
            }
    busy = [busy_in_training(part) for part in bins]
    if any(busy):
        yield {
            "type": "scatter",
            "name": "servers busy",
            "legendgroup": f"phase-{BUSY}",
            "mode": "lines+markers",
            "x": places,
            "y": [None if value is None else _short(100 * value) for value in busy],
            "line": {"width": 2},
            "marker": {"size": 4},
            "hovertemplate": "servers had requests for %{y:.3g} % of training<extra></extra>",
        }


def _short(value: float) -> float:
    """Round to five digits: no screen shows more, and the page is smaller."""
    return float(f"{value:.5g}")
