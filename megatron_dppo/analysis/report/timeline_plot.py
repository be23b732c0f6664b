"""Draws runs over their wall time: what the trainer did and, beneath, what was sampled meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_dppo.analysis.report.axes import panel_title
from megatron_dppo.analysis.report.plots import Section, Trace
from megatron_dppo.analysis.report.timeline import (
    WORDS,
    Cycle,
    Phase,
    binned,
    busy_in_training,
    cycles,
    sentence,
    shares,
    why_absent,
)
from megatron_dppo.run_folder.reader import Run

DETAILED = 20  # rollouts drawn over time; all of them are in the shares
BINS = 50  # bars of shares, whatever the run's length
MOST_RUNS = 4  # that are drawn; of more, the sentences stand alone
GENERATION, BUSY = "generation", "busy"  # names of their colours; a phase's is the phase
_TRAINER_LANE, _GENERATION_LANE, _THICK = 1, 0, 0.8
_LANES_HEIGHT, _SHARES_HEIGHT, _GAP = 110, 150, 78  # pixels
_MARGINS = {"l": 78, "r": 8, "t": 28, "b": 44}

SECTION = Section(
    "time-line",
    "Time line",
    f"What the trainer did over wall time, for the last {DETAILED} rollouts and, as shares, for the whole run. "
    "The bar of generation beneath is as thick as the share of the time with requests on their way; lines are "
    "pushes. Where both lanes are full, generation hides behind training; where they take turns, one waits "
    "for the other. Time between rows, as of a resume, is left out.",
)


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
        layout[f"xaxis{axis}"] = _x_axis("seconds" if is_lanes else "rollout", f"y{axis}")
        layout[f"yaxis{axis}"] = _lane_axis(f"x{axis}", domain) if is_lanes else _share_axis(f"x{axis}", domain)
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
    beside: list[tuple[float, float, Cycle]] = []
    for at, cycle in zip(starts, of, strict=True):
        sampled += [(at[phase], cycle.seconds[phase], cycle) for phase in ("evaluation", "rollout")]
        beside.append((at["train"], cycle.training_s, cycle))
    yield _lane("sampling", GENERATION, _GENERATION_LANE, sampled, lambda _: 1.0)
    if any(cycle.busy for cycle in of):
        name = "sampling during training, %{customdata[1]}"
        yield _lane(name, GENERATION, _GENERATION_LANE, beside, lambda cycle: cycle.busy or 0.0)
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
    now, found = 0.0, list[dict[Phase, float]]()
    for cycle in of:
        at: dict[Phase, float] = {}
        for phase in WORDS:
            at[phase] = now
            now += cycle.seconds[phase]
        found.append(at)
    return found


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
    bins = binned(of, BINS)
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


def _x_axis(title: str, anchor: str) -> dict[str, Any]:
    text = {"text": title, "font": {"size": 12}, "standoff": 6}
    return {"anchor": anchor, "title": text, "nticks": 9, "zeroline": False}


def _lane_axis(anchor: str, domain: tuple[float, float]) -> dict[str, Any]:
    lanes = {"tickvals": [_GENERATION_LANE, _TRAINER_LANE], "ticktext": ["generation", "trainer"]}
    return {
        "anchor": anchor,
        "domain": list(domain),
        "range": [-0.5, 1.5],
        "showgrid": False,
        "zeroline": False,
    } | lanes


def _share_axis(anchor: str, domain: tuple[float, float]) -> dict[str, Any]:
    return {"anchor": anchor, "domain": list(domain), "range": [0, 100], "nticks": 6}


def _short(value: float) -> float:
    """Round to five digits: no screen shows more, and the page is smaller."""
    return float(f"{value:.5g}")
