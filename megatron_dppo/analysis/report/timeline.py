"""Reads from a run's rows what the trainer did with its time, and how much of it overlapped with sampling.

A row has the seconds of its phases, not when they were, so that the order is the loop's: evaluation,
checkpoint, rollout, training, push. Time between rows (a start, a resume) is in no row, and left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Cycle:
    """Seconds of one rollout, from the evaluation before it to the push after it.

    Attributes:
        rollout: Its number, from 0.
        seconds: Seconds of each phase, in the order of `WORDS`.
        hold_s: Seconds of the push until no request was in flight.
        busy: Share of `training_s` with requests in flight, or `None` if not measured.
        requests: Mean number of requests over that time, or `None` if not measured.
        age_mean: Mean staleness of its tokens, in versions, or `None` if not measured.
        age_max: Staleness of its oldest token.
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
    is_ahead, is_saving_inside = bool(run.option("rollout.max_staleness")), _saves_between_steps(run)
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


def _saves_between_steps(run: Run) -> bool:
    return bool(run.option("checkpoint.every_steps"))


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


def hidden(of: Sequence[Cycle]) -> float | None:
    """Return the share of generation's time that overlapped training, or `None` if unknown."""
    known = [cycle for cycle in of if cycle.busy is not None]
    beside = sum(cycle.busy * cycle.training_s for cycle in known if cycle.busy is not None)
    waited = sum(cycle.seconds["rollout"] for cycle in known)
    return beside / (beside + waited) if beside + waited else None


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
    parts = [f"The trainer spent {_listed([first.replace(' %', ' % of its time', 1), *others])}."]
    mean = _mean((cycle.age_mean, 1.0) for cycle in found)
    largest = max((cycle.age_max for cycle in found if cycle.age_max is not None), default=None)
    if mean is not None and largest is not None:
        parts.append(f"Tokens were {mean:.2g} versions old in the mean, {largest:.0f} at most.")
    return " ".join([*parts, _overlap(run, found)])


def _overlap(run: Run, found: Sequence[Cycle]) -> str:
    if not run.option("rollout.max_staleness"):
        return "Generation and training took turns (rollout.max_staleness = 0)."
    busy, share = busy_in_training(found), hidden(found)
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


def binned(of: Sequence[Cycle], num: int) -> list[Sequence[Cycle]]:
    """Return at most `num` runs of successive cycles, all of one length but the last."""
    length = max(-(-len(of) // num), 1)
    return [of[start : start + length] for start in range(0, len(of), length)]


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def _listed(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
