"""Reads a run folder, also while its run is still writing."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_dppo.config.resuming import SettingChange
from megatron_dppo.errors import DataError

_NON_FINITE = {"NaN", "Infinity", "-Infinity"}
_KINDS = ("step", "rollout", "evaluation")
_CHANGE = "change"


@dataclass(frozen=True)
class MetricsRow:
    """One row of metrics.jsonl."""

    rollout: int  # from 0; for an evaluation, the number of rollouts finished before it
    step: int | None  # gradient step from 0; only step rows have one
    values: Mapping[str, float]


@dataclass(frozen=True)
class ChangeRow:
    """A setting that changed before the run was resumed."""

    rollout: int  # rollouts finished before it
    change: SettingChange


@dataclass(frozen=True)
class Run:
    """Contents of a run folder."""

    name: str
    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    steps: tuple[MetricsRow, ...]
    rollouts: tuple[MetricsRow, ...]
    evaluations: tuple[MetricsRow, ...]
    changes: tuple[ChangeRow, ...] = ()
    notes: tuple[str, ...] = ()  # oddities of the files, for the report

    def option(self, key: str) -> Any:
        """Return the config's value at a dotted key; None if it is not set."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def read_run(path: Path) -> Run:
    """Read a run folder; only metrics.jsonl's last line may be torn, since the run may still be writing it."""
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder. Name the folder of a run: the one with metrics.jsonl in it.")
    missing = [name for name in ("config.toml", "metrics.jsonl") if not (path / name).is_file()]
    if missing:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}, so it is not the folder of a run. "
            "Name the folder that `run.folder` named."
        )
    rows, changes, notes = _read_rows(path / "metrics.jsonl")
    of_kind = {kind: tuple(row for row_kind, row in rows if row_kind == kind) for kind in _KINDS}
    _check_order(path, [row.rollout for row in of_kind["rollout"]], "rollout")
    _check_order(path, [row.step for row in of_kind["step"] if row.step is not None], "step")
    return Run(
        name=path.resolve().name,
        path=path,
        config=_read_config(path / "config.toml"),
        versions=_read_versions(path / "versions.json"),
        steps=of_kind["step"],
        rollouts=of_kind["rollout"],
        evaluations=of_kind["evaluation"],
        changes=tuple(changes),
        notes=tuple(notes),
    )


def _read_rows(file: Path) -> tuple[list[tuple[str, MetricsRow]], list[ChangeRow], list[str]]:
    lines = file.read_bytes().split(b"\n")
    torn = lines.pop()  # b"" if the file ends with a complete line
    notes: list[str] = []
    if torn:
        notes.append(
            "the last line of metrics.jsonl is incomplete and was left out: "
            "the run is still writing, or was killed"
        )
    rows: list[tuple[str, MetricsRow]] = []
    changes: list[ChangeRow] = []
    for number, line in enumerate(lines, 1):
        kind, row = _parse(file, number, line)
        if isinstance(row, ChangeRow):
            changes.append(row)
        else:
            rows.append((kind, row))
    return rows, changes, notes


def _parse(file: Path, number: int, line: bytes) -> tuple[str, MetricsRow | ChangeRow]:
    advice = "The file was edited or two runs wrote to it; restore it, or cut it after the last good line."
    try:
        row = json.loads(line)
        kind, rollout, step = row.pop("kind"), row.pop("rollout"), row.pop("step", None)
        if kind == _CHANGE:
            return kind, ChangeRow(int(rollout), SettingChange(row["setting"], row["was"], row["is"]))
        values = {name: _number(value) for name, value in row.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}, line {number}: not a row of metrics ({error}). {advice}") from error
    if kind not in _KINDS or not isinstance(rollout, int):
        raise DataError(
            f"{file}, line {number}: found kind {kind!r}; expected one of {', '.join(_KINDS)}. {advice}"
        )
    return kind, MetricsRow(rollout, step, values)


def _number(value: Any) -> float:
    if isinstance(value, str) and value not in _NON_FINITE:
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _check_order(path: Path, indices: list[int], what: str) -> None:
    for before, after in pairwise(indices):
        if after <= before:
            raise DataError(
                f"{path / 'metrics.jsonl'}: {what} {after} follows {what} {before}; expected each once. "
                "Two runs wrote to this folder, or it was resumed without cutting the file to the checkpoint."
            )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{file} is not TOML ({error}). Restore the file that the run wrote.") from error


def _read_versions(file: Path) -> dict[str, Any]:
    """Read versions.json; return an empty mapping if it is missing, because it is only informative."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file} is not JSON ({error}). Remove it, or restore the file the run wrote."
        ) from error
