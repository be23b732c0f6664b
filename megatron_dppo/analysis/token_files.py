"""Reads the files of `clipped_tokens/` and `masked_tokens/` of a run folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.metrics.masked_tokens import MEANS, TOP
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import read_jsonl

_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
_ROLLOUT_FILE = re.compile(r"rollout_(\d+)\.jsonl")


@dataclass(frozen=True)
class ClippedRow:
    """One token of a list, as `ClippedTokens.rows` wrote it."""

    preset: str  # or ACTIVE
    sign: str  # of the advantage, "+" or "-"
    token: str
    token_id: int
    count: int
    share: float  # of what the preset masked of that sign
    means: Mapping[str, float]  # of each of MEANS
    num_steps: int = 1  # gradient steps that the list counts


@dataclass(frozen=True)
class TokenList:
    """The tokens that masks dropped most often in one rollout, at most TOP of each preset and sign."""

    rows: Sequence[ClippedRow]  # of a preset and sign the most frequent first
    num_steps: int  # gradient steps that it counts; 0 if it is empty, and so does not show it

    def of(self, preset: str, sign: str) -> list[ClippedRow]:
        """Return the rows of one preset (or ACTIVE) and one sign, "+" or "-"."""
        return [row for row in self.rows if (row.preset, row.sign) == (preset, sign)]


def list_files(run: Run) -> dict[int, tuple[Path, ...]]:
    """Return the files of each listed rollout, by the rollout counted from 1, in order.

    Earlier versions wrote a file for each gradient step, so a rollout may have several. Files of rollouts and
    steps that metrics.jsonl does not have are left out: a resume undid them.
    """
    found: dict[int, tuple[Path, ...]] = {}
    rollout_of = {row.step: row.rollout for row in run.steps}
    for step, file in step_files(run, "clipped_tokens").items():
        found[rollout_of[step]] = (*found.get(rollout_of[step], ()), file)
    done = {row.rollout for row in run.rollouts}
    for file in (run.path / "clipped_tokens").glob("rollout_*.jsonl"):
        if (match := _ROLLOUT_FILE.fullmatch(file.name)) and int(match[1]) in done:
            found[int(match[1])] = (file,)
    return {index + 1: found[index] for index in sorted(found)}


def rollouts_to_show(listed: Mapping[str, Collection[int]], requested: int | None) -> dict[str, int]:
    """Return the rollout to show the list of, for each run that has lists; rollouts are counted from 1.

    Args:
        listed: Listed rollouts by the run's name.
        requested: Rollout, from 1. `None` means the last one that all runs list, or each run's last one.
    """
    having = {name: sorted(of) for name, of in listed.items() if of}
    shared = sorted(set[int].intersection(*map(set, having.values()))) if having else []
    if requested is None:
        return {name: shared[-1] if shared else of[-1] for name, of in having.items()}
    if requested in shared:
        return dict.fromkeys(having, requested)
    if not having:
        found, expected = f"{requested}, and no run that lists masked tokens", "a listed rollout"
        action = "Train with tracking.clipped_tokens_every, or leave the option out."
        raise ConfigError(Problem("--tokens-at", found, expected, action))
    each = "; ".join(f"{name} lists {', '.join(map(str, of))}" for name, of in having.items())
    action = f"Name {' or '.join(map(str, shared))}." if shared else "Compare runs that share a listed rollout."
    expected = "a rollout, counted from 1, that each run with lists has listed"
    raise ConfigError(Problem("--tokens-at", f"{requested}, but {each}", expected, action))


def read_list(files: Sequence[Path]) -> TokenList:
    """Read the list of a rollout, and merge it if each gradient step has a file."""
    lists = [[_row(file, number, row) for number, row in read_jsonl(file)] for file in files]
    num_steps = sum(max((row.num_steps for row in rows), default=0) for rows in lists)
    return TokenList(lists[0] if len(lists) == 1 else _merge(lists), num_steps)


def _merge(lists: Sequence[Sequence[ClippedRow]]) -> list[ClippedRow]:
    """Return lists as one: counts and totals of masked tokens add up, and means are weighted by counts."""
    of_token: dict[tuple[str, str], dict[int, list[ClippedRow]]] = {}
    totals: Counter[tuple[str, str]] = Counter()
    for rows in lists:
        first = {(row.preset, row.sign): row for row in rows}
        totals.update({key: round(row.count / row.share) for key, row in first.items()})
        for row in rows:
            of_token.setdefault((row.preset, row.sign), {}).setdefault(row.token_id, []).append(row)
    found: list[ClippedRow] = []
    for key, of_ids in sorted(of_token.items()):
        summed = [_sum(rows, totals[key]) for rows in of_ids.values()]
        found += sorted(summed, key=lambda row: (-row.count, row.token_id))[:TOP]
    return found


def _sum(rows: Sequence[ClippedRow], total: int) -> ClippedRow:
    count, first = sum(row.count for row in rows), rows[0]
    means = {name: _mean(rows, name) for name in MEANS}
    return ClippedRow(first.preset, first.sign, first.token, first.token_id, count, count / total, means)


def step_files(run: Run, folder: str) -> dict[int, Path]:
    """Return the files of the steps in metrics.jsonl, in order; others are of steps that a resume undid."""
    steps = {row.step for row in run.steps}
    names = sorted((run.path / folder).glob("step_*.jsonl"))
    found = {int(match[1]): file for file in names if (match := _STEP_FILE.fullmatch(file.name))}
    return {step: found[step] for step in sorted(found) if step in steps}


def _mean(rows: Sequence[ClippedRow], name: str) -> float:
    return sum(row.count * row.means[name] for row in rows) / sum(row.count for row in rows)


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
            num_steps=int(str(row.get("num_steps", 1))),
        )
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{file}, line {number}: not a row of clipped tokens ({error!r}). Restore or remove the file."
        ) from error
