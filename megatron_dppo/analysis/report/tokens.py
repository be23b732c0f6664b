"""Builds the report's section on masked tokens: those that each preset drops most often, by sign."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.token_files import read_clipped, step_files
from megatron_dppo.metrics.clipped_tokens import ACTIVE, MEANS, TOP
from megatron_dppo.run_folder.reader import Run

_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass
class _Masked:
    """Tokens of one sign that one preset masked, over the listed gradient steps."""

    total: float = 0.0  # masked tokens, those of no list included
    tokens: dict[int, str] = field(default_factory=dict[int, str])
    sums: dict[int, list[float]] = field(default_factory=dict[int, list[float]])  # a count, then MEANS's sums


def token_lists(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the page's data for each run that listed its masked tokens, as plain values.

    A preset has `positive` and `negative`: rows of token, id, count, share, and means of mu, pi, entropy and
    |pi - mu|, the last five None where they are not finite.

    Raises:
        DataError: A file of the list is not what a run writes.
    """
    shown: list[dict[str, Any]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        files = step_files(run, "clipped_tokens").values()
        if files:
            presets = list(_presets(run, files))
            shown.append({"run": index, "name": name, "num_lists": len(files), "presets": presets})
    return shown


def _presets(run: Run, files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    masked: dict[tuple[str, str], _Masked] = {}
    for file in files:
        _add_file(masked, file)
    order = [ACTIVE, *PRESETS]
    named = {preset for preset, _ in masked}
    for preset in sorted(named, key=lambda name: (order.index(name) if name in order else len(order), name)):
        signs = {"positive": masked.get((preset, "+")), "negative": masked.get((preset, "-"))}
        trained = f"{run.option('algorithm.preset') or 'preset not set'} (trained)"
        yield {
            "name": trained if preset == ACTIVE else f"{preset} (shadow)",
            **{sign: [] if found is None else _rows(found) for sign, found in signs.items()},
            **{f"num_{sign}": 0 if found is None else round(found.total) for sign, found in signs.items()},
        }


def _add_file(masked: dict[tuple[str, str], _Masked], file: Path) -> None:
    totals: dict[tuple[str, str], float] = {}
    for row in read_clipped(file):
        key = row.preset, row.sign
        totals[key] = row.count / row.share
        of_key = masked.setdefault(key, _Masked())
        of_key.tokens[row.token_id] = visible(row.token)
        sums = of_key.sums.setdefault(row.token_id, [0.0] * (1 + len(MEANS)))
        for place, value in enumerate((1.0, *row.means.values())):
            sums[place] += row.count * value
    for key, total in totals.items():
        masked[key].total += total


def _rows(masked: _Masked) -> list[list[Any]]:
    ranked = sorted(masked.sums.items(), key=lambda item: (-item[1][0], item[0]))
    rows: list[list[Any]] = []
    for token_id, (count, *sums) in ranked[:TOP]:
        means = [rounded(total / count) for total in sums]
        rows.append([masked.tokens[token_id], token_id, round(count), rounded(count / masked.total), *means])
    return rows


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
