"""Shows masked tokens with the largest divergence in their text, with the file and line of their sample."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_dppo.analysis.report.tokens import readable, rounded, visible
from megatron_dppo.analysis.token_files import step_files
from megatron_dppo.errors import DataError
from megatron_dppo.metrics.masked_tokens import FARTHEST, SIGNS, TOKENS_BEFORE
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import read_jsonl

_NUMBERS = ("mu", "pi", "divergence", "advantage")


def farthest(run: Run, beside: Path, rollout: int) -> list[dict[str, Any]]:
    """Return the masked tokens of largest divergence in one rollout, by sign, as plain values.

    `rollout` of a row counts from 1, and so does `step`, the place of the gradient step in the rollout.

    Args:
        run: Which ran with `tracking.clipped_tokens_every`; of others there are none.
        beside: Folder of the report, for links to samples.
        rollout: Counted from 1.

    Raises:
        DataError: A file has the wrong format.
    """
    files = step_files(run, "masked_tokens")
    steps = [row.step for row in run.steps if row.rollout == rollout - 1 and row.step is not None]
    found = [row for place, step in enumerate(steps, 1) if step in files for row in _rows(place, files[step])]
    found.sort(key=lambda row: (-float(row["divergence"]), row["step"], row["sample"], row["position"]))
    kept = [row for sign in SIGNS for row in [row for row in found if row["sign"] == sign][:FARTHEST]]
    samples = _Samples(run.path / "samples", beside)
    samples.find(kept)
    return [_shown(row) | samples.place(row) for row in kept]


def _rows(step: int, file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, row in read_jsonl(file):
        read: dict[str, Any] = {"step": step} | row
        try:
            texts = {name: str(read[name]) for name in ("sign", "before", "token", "after", "sample")}
            counts = {name: int(read[name]) for name in ("step", "rollout", "position")}
            rows.append(texts | counts | {name: float(read[name]) for name in _NUMBERS})
        except (KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{file}, line {number}: not a masked token ({error!r}). Restore or remove the file."
            ) from error
    return rows


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sign": row["sign"],
        "before": ("… " if row["position"] > TOKENS_BEFORE else "") + readable(row["before"]),
        "token": visible(row["token"]),
        "after": readable(row["after"]),
        **{name: row[name] for name in ("sample", "position")},
        "step": row["step"],
        "rollout": row["rollout"] + 1,
        **{name: rounded(row[name]) for name in _NUMBERS},
    }


class _Samples:
    """Index of the responses in `samples/`."""

    def __init__(self, folder: Path, beside: Path) -> None:
        self._folder, self._beside = folder, beside
        self._lines: dict[tuple[int, str], tuple[int, int]] = {}  # line and prompt length

    def find(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Read the existing files of the rows' rollouts."""
        wanted: dict[int, set[str]] = {}
        for row in rows:
            wanted.setdefault(row["rollout"], set()).add(row["sample"])
        for rollout, ids in wanted.items():
            file = self._file(rollout)
            for number, sample in read_jsonl(file) if file.is_file() else ():
                values: dict[str, Any] = sample
                if values.get("id") in ids:
                    self._lines[rollout, values["id"]] = number, int(values.get("prompt_length", 0))

    def place(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a link, the line, and the token's place in the response from 1; empty without such a line."""
        found = self._lines.get((row["rollout"], row["sample"]))
        if found is None:
            return {}
        file, (line, prompt_length) = self._file(row["rollout"]), found
        link = quote(os.path.relpath(file.resolve(), self._beside.resolve()))
        return {
            "link": link,
            "file": f"{self._folder.name}/{file.name}",
            "line": line,
            "place": row["position"] - prompt_length + 1,
        }

    def _file(self, rollout: int) -> Path:
        return self._folder / f"rollout_{rollout:06d}.jsonl"
