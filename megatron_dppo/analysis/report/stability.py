"""Finds what went wrong in a run: alarms, by the rules that raise them while it trains, and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.metrics.alarms import AlarmWatch, noise_warning
from megatron_dppo.run_folder.reader import Run


@dataclass(frozen=True)
class Alarm:
    """An alarm that a rollout raised."""

    rollout: int  # from 1
    name: str  # of its rule in `metrics.alarms`
    text: str


def alarms_of(run: Run) -> list[Alarm]:
    """Return the alarms that the run's rows raise, in order, whether or not `tracking.alarms` was on."""
    watch = AlarmWatch()
    steps: dict[int, list[Mapping[str, float]]] = {}
    for row in run.steps:
        steps.setdefault(row.rollout, []).append(row.values)
    found: list[Alarm] = []
    for row in run.rollouts:
        for values in steps.get(row.rollout, ()):
            watch.add_step(values)
        found += [Alarm(row.rollout + 1, name, text) for name, text in watch.check(row.values).items()]
    return found


def warnings_of(run: Run) -> list[str]:
    """Return the run's warnings other than alarms, from its rows and by the same rules, as sentences."""
    rows: list[Mapping[str, float]] = []
    found: list[str] = []
    for row in run.rollouts:
        rows.append(row.values)
        if "trust_region/noise_masked_fraction" in row.values and (text := noise_warning(rows)):
            found.append(f"from rollout {row.rollout + 1} on {text}")
            break
    too_long = [row.values.get("rollout/prompts_too_long", 0.0) for row in run.rollouts]
    if total := sum(filter(math.isfinite, too_long)):
        limit = run.option("data.max_prompt_tokens")
        longer = "" if limit is None else f" of {limit}"
        found.append(f"{total:.0f} prompts are longer than data.max_prompt_tokens{longer} and were left out")
    return found


def num_skipped_steps(run: Run) -> int:
    """Return the gradient steps that were skipped for a loss or a gradient that is not finite."""
    return int(sum(row.values.get("optimizer/skipped_steps", 0.0) for row in run.steps))


def num_roll_backs(run: Run) -> int:
    """Return how often the run went back to an earlier checkpoint after an alarm."""
    return int(max((row.values.get("alarms/roll_backs", 0.0) for row in run.rollouts), default=0.0))


def alarm_table(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return the run's place and the alarm, in the order of runs and rollouts."""
    return [{"run": place, "alarm": alarm} for place, run in enumerate(runs) for alarm in alarms_of(run)]
