"""Builds the report's section on masked tokens: those that each preset drops most often, by sign."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.token_files import (
    ClippedRow,
    TokenList,
    listed_rollouts,
    read_list,
    rollouts_to_show,
)
from megatron_dppo.metrics.clipped_tokens import ACTIVE, MEANS
from megatron_dppo.run_folder.reader import Run

_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def token_lists(
    runs: Sequence[Run], names: Sequence[str], tokens_at: int | None = None
) -> list[dict[str, Any]]:
    """Return the page's data for each run that listed its masked tokens, as plain values.

    A preset has `positive` and `negative`: rows of token, id, count, share, and means of mu, pi, entropy and
    |pi - mu|. The last five are `None` if they are not finite.

    Args:
        runs: Runs of the report.
        names: Names of the runs.
        tokens_at: Rollout of the lists, from 1. `None` means the last one that all of these runs list.

    Raises:
        ConfigError: A run that has lists has none of that rollout.
        DataError: A file of the list has the wrong format.
    """
    shown: list[dict[str, Any]] = []
    listed = {name: listed_rollouts(run) for run, name in zip(runs, names, strict=True)}
    rollouts = rollouts_to_show(listed, tokens_at)
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        if name not in rollouts:
            continue
        rollout = rollouts[name]
        files = listed[name][rollout]
        found = read_list(files)
        shown.append(
            {
                "run": index,
                "name": name,
                "rollout": rollout,
                "rollouts": list(listed[name]),
                "num_listed": found.num_steps,
                "num_steps": sum(row.rollout == rollout - 1 for row in run.steps),
                "is_cut": len(files) > 1,
                "presets": list(_presets(run, found)),
            }
        )
    return shown


def _presets(run: Run, found: TokenList) -> Iterator[dict[str, Any]]:
    order = [ACTIVE, *PRESETS]
    named = {row.preset for row in found.rows}
    for preset in sorted(named, key=lambda name: (order.index(name) if name in order else len(order), name)):
        signs = {"positive": found.of(preset, "+"), "negative": found.of(preset, "-")}
        trained = f"{run.option('algorithm.preset') or 'preset not set'} (trained)"
        yield {
            "name": trained if preset == ACTIVE else f"{preset} (shadow)",
            **{sign: [_shown(row) for row in rows] for sign, rows in signs.items()},
            **{f"num_{sign}": _total(rows) for sign, rows in signs.items()},
        }


def _total(rows: Sequence[ClippedRow]) -> int:
    """Return the number of all masked tokens of a preset and sign, in its list or not."""
    return round(rows[0].count / rows[0].share) if rows else 0


def _shown(row: ClippedRow) -> list[Any]:
    means = [rounded(row.means[name]) for name in MEANS]
    return [visible(row.token), row.token_id, row.count, rounded(row.share), *means]


def rounded(value: float) -> float | None:
    """Round to four digits, for a table; None for values that are not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def visible(text: str) -> str:
    """Return a token with its white space as signs, and invisible characters as their code points."""
    return "".join(map(_sign, text)) or "⟨empty⟩"


def readable(text: str) -> str:
    """Return text around a token: white space stays, line ends get a sign, the rest is as in `visible`."""
    return "".join("↵\n" if char == "\n" else char if char in " \t" else _sign(char) for char in text)


def _sign(char: str) -> str:
    if char in _SPACES:
        return _SPACES[char]
    category = unicodedata.category(char)
    if category[0] in "CZ":
        return f"⟨{ord(char):04X}⟩"
    return f"\N{DOTTED CIRCLE}{char}" if category[0] == "M" else char
