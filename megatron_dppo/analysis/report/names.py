"""Names runs by what differs between them: "R3 on" is clearer than the name of a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.analysis.report.text import differing_keys, distinct_names, places_of_equal, settings_of
from megatron_dppo.config.load import shown
from megatron_dppo.run_folder.reader import Run

R3 = "rollout.routing_replay"
LENGTH = "run.num_rollouts"
LONGEST_NAME = 40  # characters; beyond them a folder's name is the better one
_SEED = re.compile(r"[/_., -]*(seed)?[/_. -]*\d+$")


def experiment_of(run: Run) -> dict[str, Any]:
    """Return the settings that tell experiments apart; the planned length does so only under a decay."""
    own = settings_of(run)
    if run.option("optimizer.schedule") in (None, "constant"):
        own.pop(LENGTH, None)
    return own


def changed_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings, seeds aside, on which the runs differ."""
    return differing_keys([experiment_of(run) for run in runs])


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return distinct names: the setting that differs, if it is one, with seeds, else the folders' names."""
    folders = distinct_names(runs)
    if len(runs) == 1 or len(changed_keys(runs)) > 1:
        return folders
    labels = setting_labels([experiment_of(run) for run in runs])
    if labels is None:
        return folders
    groups = places_of_equal([experiment_of(run) for run in runs])
    repeated = {place for group in groups if len(group) > 1 for place in group}
    names = [
        ", ".join(filter(None, [label, f"seed {shown(run.option('run.seed'))}" if place in repeated else ""]))
        for place, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    return names if len(set(names)) == len(names) else folders


def setting_labels(settings: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the values of the settings that differ, in words; empty if none does, None if they are long."""
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
    is_told = len(set(labels)) == len(different)
    return labels if is_told and max(map(len, labels)) <= LONGEST_NAME else None


def places_of_settings(runs: Sequence[Run]) -> list[list[int]]:
    """Return the indices of runs that differ in their seed alone, setting by setting."""
    return places_of_equal([experiment_of(run) for run in runs])


def setting_names(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return a name for each of `places_of_settings`: what differs, else its runs' names without seeds."""
    groups = places_of_settings(runs)
    labels = setting_labels([experiment_of(run) for run in runs])
    if labels is not None and len(groups) > 1:
        return [labels[places[0]] for places in groups]
    common = [{_SEED.sub("", names[place]) for place in places} - {""} for places in groups]
    found = [own.pop() if len(own) == 1 else "" for own in common]
    if all(found) and len(set(found)) == len(found):
        return [name if len(of) > 1 else names[of[0]] for name, of in zip(found, groups, strict=True)]
    return [names[places[0]] for places in groups]


def _r3(value: Any, values: Sequence[Any]) -> str:
    """Return "R3 on" or "R3 off", with the value if runs differ in how routes are captured."""
    if value == "replay":
        return "R3 on"
    without = {shown(other) for other in values if other != "replay"}
    return "R3 off" if len(without) == 1 else f"R3 off ({shown(value)})"


def _label(key: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else shown(value)
    return text if key == "preset" and value is not None else f"{key} {text}"
