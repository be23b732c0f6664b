"""Reads the tokens that a run's own mask drops from its `clipped_tokens/` (section 6 and Appendix E)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from megatron_dppo.analysis.report.plots import Points
from megatron_dppo.analysis.token_files import ClippedRow, read_clipped
from megatron_dppo.metrics.clipped_tokens import ACTIVE

CURVES = {"clipped/rollout_prob": "mu", "clipped/entropy": "entropy"}  # metric -> mean of a row


def own_rows(file: Path) -> list[ClippedRow]:
    """Return the rows of the mask that trained.

    Raises:
        DataError: The file is no list of clipped tokens.
    """
    return [row for row in read_clipped(file) if row.preset == ACTIVE]


def clipped_curves(files: Mapping[int, Path], rollout_of: Mapping[int, int]) -> dict[str, Points]:
    """Return mean mu and entropy of masked tokens over rollouts, each listed occurrence counting once.

    Args:
        files: Gradient step -> list.
        rollout_of: Gradient step -> rollout.
    """
    found: dict[str, dict[int, list[float]]] = {metric: {} for metric in CURVES}
    for step, file in files.items():
        if not (rows := own_rows(file)):
            continue
        for metric, name in CURVES.items():
            found[metric].setdefault(rollout_of[step], []).append(_mean(rows, name))
    return {
        metric: ([float(rollout) for rollout in of], [fmean(values) for values in of.values()])
        for metric, of in found.items()
    }


def _mean(rows: Sequence[ClippedRow], name: str) -> float:
    return sum(row.count * row.means[name] for row in rows) / sum(row.count for row in rows)
