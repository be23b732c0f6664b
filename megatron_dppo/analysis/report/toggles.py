"""Assigns runs their colours and toggles in the report; seeds of one setting share both."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.analysis.report.text import settings_of
from megatron_dppo.run_folder.reader import Run

FEW = 4  # runs that are each named in the title, and toggled one by one
_SEED = re.compile(r"[/_.-]*(seed)?[/_.-]*\d+$")


@dataclass(frozen=True)
class Toggle:
    """Runs that one button hides or shows; its index is its colour and dash."""

    label: str
    runs: tuple[int, ...]  # places in the report's order


def toggles(runs: Sequence[Run], names: Sequence[str]) -> list[Toggle]:
    """Return one toggle for each run; of many runs of several settings, one for each setting."""
    by_setting: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        by_setting.setdefault(repr(sorted(settings_of(run).items())), []).append(index)
    if len(by_setting) == 1 or len(runs) <= FEW:
        return [Toggle(name, (index,)) for index, name in enumerate(names)]
    labels = [_label([names[i] for i in of]) for of in by_setting.values()]
    return [
        Toggle(label if labels.count(label) == 1 else f"{names[of[0]]} ×{len(of)}", tuple(of))
        for label, of in zip(labels, by_setting.values(), strict=True)
    ]


def looks(toggled: Sequence[Toggle]) -> list[int]:
    """Return the index of each run's toggle."""
    place_of = {run: place for place, toggle in enumerate(toggled) for run in toggle.runs}
    return [place_of[run] for run in range(len(place_of))]


def title(names: Sequence[str], toggled: Sequence[Toggle]) -> str:
    """Return all names where they are few, else their number."""
    if len(names) <= FEW:
        return " · ".join(names)
    settings = "" if len(toggled) == len(names) else f" of {len(toggled)} settings"
    return f"{len(names)} runs{settings}"


def _label(names: Sequence[str]) -> str:
    """Return the common part of the names but for a seed at their end, and their number."""
    if len(names) == 1:
        return names[0]
    common = {_SEED.sub("", name) for name in names} - {""}
    return f"{common.pop() if len(common) == 1 else names[0]} ×{len(names)}"
