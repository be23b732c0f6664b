"""Decides whether the seconds of runs may be compared, and finds what a recomputed anchor costs."""

import math
from collections.abc import Sequence

from megatron_dppo.analysis.report.names import experiment_of
from megatron_dppo.analysis.report.text import places_of_equal
from megatron_dppo.config.load import shown
from megatron_dppo.run_folder.reader import Run

MIN_REPEATS = 6  # runs of each setting, as many as seeds that decide
_ANCHOR = ("time/anchor_s", "time/train_s", "time/total_s")


def anchor_cost(run: Run) -> str | None:
    """Return a sentence on the time in which log-probs are recomputed; none if the run does not do that."""
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
