"""Reads the files of `clipped_tokens/` and `masked_tokens/` of a run folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import DataError
from megatron_dppo.metrics.clipped_tokens import ACTIVE, MEANS
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.jsonl import read_jsonl

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class ClippedRow:
    """One token of a gradient step's list, as `ClippedTokens.rows` wrote it."""

    preset: str  # or ACTIVE
    sign: str  # of the advantage, "+" or "-"
    token: str
    token_id: int
    count: int
    share: float  # of what the preset masked of that sign
    means: Mapping[str, float]  # of each of MEANS


def step_files(run: Run, folder: str) -> dict[int, Path]:
    """Return the files of the steps in metrics.jsonl, in order; others are of steps that a resume undid."""
    steps = {row.step for row in run.steps}
    names = sorted((run.path / folder).glob("step_*.jsonl"))
    found = {int(match[1]): file for file in names if (match := _STEP_FILE.fullmatch(file.name))}
    return {step: found[step] for step in sorted(found) if step in steps}


def read_clipped(file: Path) -> list[ClippedRow]:
    """Read a step's list, all presets.

    Raises:
        DataError: The file is no list of clipped tokens.
    """
    return [_row(file, number, row) for number, row in read_jsonl(file)]


def own_rows(file: Path) -> list[ClippedRow]:
    """Return the rows of the mask that trained.

    Raises:
        DataError: The file is no list of clipped tokens.
    """
    return [row for row in read_clipped(file) if row.preset == ACTIVE]


def _row(file: Path, number: int, row: Mapping[str, object]) -> ClippedRow:
    try:
        return ClippedRow(
            preset=str(row["preset"]),
            sign=str(row["sign"]),
            token=str(row["token"]),
            token_id=int(str(row["token_id"])),
            count=int(str(row["count"])),
            share=float(str(row["share"])),
            means={name: float(str(row[f"mean_{name}"])) for name in MEANS},
        )
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{file}, line {number}: not a row of clipped tokens ({error!r}). Restore or remove the file."
        ) from error
