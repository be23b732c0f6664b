"""Judges runs by their rows: alarms, warnings, skipped steps, advice on sampling, comparable seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.analysis.lines import experiment_of, places_of_equal
from megatron_dppo.config.load import shown
from megatron_dppo.metrics.alarms import AlarmWatch, noise_warning
from megatron_dppo.run_folder.reader import Run

MIN_REPEATS = 6  # runs of each setting, as many as seeds that decide
_ANCHOR = ("time/anchor_s", "time/train_s", "time/total_s")


@dataclass(frozen=True)
class Alarm:
    """An alarm that a rollout raised."""

    rollout: int  # from 1
    name: str  # the rule's name in `metrics.alarms`
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


def describe_unfinished(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return a sentence on each run that has fewer rollouts than planned."""
    planned = [run.option("run.num_rollouts") for run in runs]
    return [
        f"{name} has {len(run.rollouts)} of {num} rollouts: it is still running, or it stopped."
        for run, name, num in zip(runs, names, planned, strict=True)
        if isinstance(num, int) and len(run.rollouts) < num
    ]


def alarm_table(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return the run's place and the alarm, in the order of runs and rollouts."""
    return [{"run": place, "alarm": alarm} for place, run in enumerate(runs) for alarm in alarms_of(run)]


def anchor_cost(run: Run) -> str | None:
    """Return a sentence on the time that recomputing log-probs took, or `None` if nothing is recomputed."""
    rows = [
        row.values for row in run.rollouts if all(math.isfinite(row.values.get(k, math.nan)) for k in _ANCHOR)
    ]
    anchor, training, total = (math.fsum(values[name] for values in rows) for name in _ANCHOR)
    if not rows or min(anchor, training, total) <= 0:
        return None
    shares = f"{anchor / total:.0%} of a rollout's time and {anchor / training:.0%} of its training"
    return (
        f"recomputing log-probs took {shares}; algorithm.anchor = 'rollout' has no such forward, and the paper "
        "reports about 25% less cost without it (section 5.2)."
    ).replace("%", " %")


def why_not_comparable(runs: Sequence[Run]) -> str:
    """Return why the runs' seconds must not be compared, or an empty text if they may be.

    They need one known machine, the same number of processes, and repeats: runs go one after the other, and a
    machine that was busy during one of them looks like a slow setting.
    """
    if len(runs) < 2:
        return ""
    hosts = {shown(run.versions.get("host")) for run in runs}
    if hosts == {"not set"}:
        return "the machines are not known"
    if len(hosts) > 1:
        return f"the runs ran on different machines ({', '.join(sorted(hosts))})"
    if len({shown(run.versions.get("world_size")) for run in runs}) > 1:
        return "the runs had different numbers of processes"
    groups = places_of_equal([experiment_of(run) for run in runs])
    if len(groups) > 1 and min(map(len, groups)) < MIN_REPEATS:
        few = f"fewer than {MIN_REPEATS} runs of a setting"
        return f"{few} cannot tell it from what else the machine did meanwhile"
    return ""
