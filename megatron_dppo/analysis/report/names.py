"""Names runs by what differs between them: "R3 on" says more than the name of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.analysis.report.text import differing_keys, distinct_names, places_of_equal, settings_of
from megatron_dppo.config.settings import shown
from megatron_dppo.run_folder.reader import Run

R3 = "rollout.routing_replay"
LENGTH = "run.num_rollouts"
LONGEST_NAME = 40  # characters; beyond them a folder's name is the better one


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
    """Return distinct names: what differs where that is one setting, with seeds; else those of the folders."""
    folders = distinct_names(runs)
    labels = setting_labels([experiment_of(run) for run in runs])
    if labels is None or len(runs) == 1:
        return folders
    groups = places_of_equal([experiment_of(run) for run in runs])
    repeated = {place for group in groups if len(group) > 1 for place in group}
    names = [
        ", ".join(filter(None, [label, f"seed {shown(run.option('run.seed'))}" if place in repeated else ""]))
        for place, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]
    return names if len(set(names)) == len(names) else folders


def setting_labels(settings: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the value of the one setting that differs, in words; empty where none does, None where many do."""
    keys = differing_keys(settings)
    if not keys:
        return ["" for _ in settings]
    if len(keys) > 1:
        return None
    (key,) = keys
    values = [own.get(key) for own in settings]
    labels = [_r3(value, values) if key == R3 else _label(key, value) for value in values]
    is_told = len(set(labels)) == len({shown(value) for value in values})
    return labels if is_told and max(map(len, labels)) <= LONGEST_NAME else None


def _r3(value: Any, values: Sequence[Any]) -> str:
    """Return "R3 on" or "R3 off"; where runs without capture stand beside measured ones, which of them."""
    if value == "replay":
        return "R3 on"
    without = {shown(other) for other in values if other != "replay"}
    return "R3 off" if len(without) == 1 else f"R3 off ({shown(value)})"


def _label(key: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else shown(value)
    name = key.rpartition(".")[2]
    return text if name == "preset" and value is not None else f"{name} {text}"
