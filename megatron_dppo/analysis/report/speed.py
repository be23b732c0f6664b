"""Decides whether the seconds of runs may be compared."""

from collections.abc import Sequence

from megatron_dppo.analysis.report.names import experiment_of
from megatron_dppo.analysis.report.text import places_of_equal
from megatron_dppo.config.settings import shown
from megatron_dppo.run_folder.reader import Run

MIN_REPEATS = 6  # runs of each setting, as many as seeds that decide


def why_not_comparable(runs: Sequence[Run]) -> str:
    """Return why the runs' seconds say nothing about their settings; empty where they may be compared.

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
