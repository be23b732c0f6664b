"""What `clipped_tokens/` of a run says of the tokens that its own mask drops (section 6 and Appendix E)."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dppo.diagnostics.report_plots import Points
from megatron_dppo.errors import DataError

ACTIVE = "active"  # the objective that trains, among the presets of a list
CURVES = {"clipped/rollout_prob": "mean_mu", "clipped/entropy": "mean_entropy"}  # metric -> field of a row
_FILE = re.compile(r"step_(\d+)\.jsonl")

Rows = list[dict[str, Any]]


def clipped_files(run: Path) -> dict[int, Path]:
    """By gradient step, in order, the run's lists; some may be of a past that a resume undid."""
    folder = run / "clipped_tokens"
    names = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): path for path in names if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_clipped(file: Path) -> Rows:
    """The rows of the run's own mask.

    Raises:
        DataError: The file is no list of clipped tokens.
    """
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if row["preset"] == ACTIVE]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file}: found no list of clipped tokens ({error}); expected JSON rows with preset, sign and "
            "token. Restore the file that the run wrote, or remove it."
        ) from error


def clipped_curves(files: Mapping[int, Path], rollout_of: Mapping[int, int]) -> dict[str, Points]:
    """Mean mu and entropy of masked tokens over rollouts, each listed occurrence counting once.

    Args:
        files: Gradient step -> list.
        rollout_of: Gradient step -> rollout.
    """
    found: dict[str, dict[int, list[float]]] = {metric: {} for metric in CURVES}
    for step, file in files.items():
        if not (rows := read_clipped(file)):
            continue
        for metric, field in CURVES.items():
            found[metric].setdefault(rollout_of[step], []).append(_mean(rows, field))
    return {
        metric: ([float(rollout) for rollout in of], [fmean(values) for values in of.values()])
        for metric, of in found.items()
    }


def _mean(rows: Sequence[Mapping[str, Any]], field: str) -> float:
    total = sum(row["count"] for row in rows)
    return sum(row["count"] * float(row[field]) for row in rows) / total
