"""Builds the report's sections on samples: masked tokens in their text, and trees of agents' episodes."""

from __future__ import annotations

import heapq
import math
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_dppo.algorithms import PRESETS
from megatron_dppo.analysis.token_files import (
    ClippedRow,
    TokenList,
    list_files,
    read_list,
    rollouts_to_show,
    step_files,
)
from megatron_dppo.errors import DataError
from megatron_dppo.metrics.masked_tokens import ACTIVE, FARTHEST, MEANS, SIGNS, TOKENS_BEFORE
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import read_jsonl

_SPACES = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_NUMBERS = ("mu", "pi", "divergence", "advantage")
MOST = 3
"""Episodes of a run that are drawn: those with the most calls."""
_SHOWN = 80  # characters of a response


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
    """
    shown: list[dict[str, Any]] = []
    listed = {name: list_files(run) for run, name in zip(runs, names, strict=True)}
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
            **{sign: [_list_row(row) for row in rows] for sign, rows in signs.items()},
            **{f"num_{sign}": _total(rows) for sign, rows in signs.items()},
        }


def _total(rows: Sequence[ClippedRow]) -> int:
    """Return how many tokens a preset masked for one sign, listed or not."""
    return round(rows[0].count / rows[0].share) if rows else 0


def _list_row(row: ClippedRow) -> list[Any]:
    means = [round_to_table(row.means[name]) for name in MEANS]
    return [make_visible(row.token), row.token_id, row.count, round_to_table(row.share), *means]


def round_to_table(value: float) -> float | None:
    """Round to four digits, for a table; None for values that are not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def make_visible(text: str) -> str:
    """Return a token with its white space as signs, and invisible characters as their code points."""
    return "".join(map(_sign, text)) or "⟨empty⟩"


def make_readable(text: str) -> str:
    """Return text around a token: white space stays, line ends get a sign, the rest is as in `visible`."""
    return "".join("↵\n" if char == "\n" else char if char in " \t" else _sign(char) for char in text)


def _sign(char: str) -> str:
    if char in _SPACES:
        return _SPACES[char]
    category = unicodedata.category(char)
    if category[0] in "CZ":
        return f"⟨{ord(char):04X}⟩"
    return f"\N{DOTTED CIRCLE}{char}" if category[0] == "M" else char


def farthest(run: Run, report_folder: Path, rollout: int) -> list[dict[str, Any]]:
    """Return the masked tokens of largest divergence in one rollout, by sign, as plain values.

    `rollout` of a row counts from 1, and so does `step`, the place of the gradient step in the rollout.

    Args:
        run: Which ran with `tracking.clipped_tokens_every`; of others there are none.
        report_folder: Folder of the report, for links to samples.
        rollout: Counted from 1.
    """
    files = step_files(run, "masked_tokens")
    steps = [row.step for row in run.steps if row.rollout == rollout - 1 and row.step is not None]
    found = [row for place, step in enumerate(steps, 1) if step in files for row in _rows(place, files[step])]
    found.sort(key=lambda row: (-float(row["divergence"]), row["step"], row["sample"], row["position"]))
    kept = [row for sign in SIGNS for row in [row for row in found if row["sign"] == sign][:FARTHEST]]
    folder = run.path / "samples"
    samples = _find_samples(folder, kept)
    shown: list[dict[str, Any]] = []
    for row in kept:
        shown.append(_excerpt(row))
        if (row["rollout"], row["sample"]) in samples:
            line, prompt_length = samples[row["rollout"], row["sample"]]
            file = _samples_file(folder, row["rollout"])
            shown[-1] |= {
                "link": quote(os.path.relpath(file.resolve(), report_folder.resolve())),
                "file": f"{folder.name}/{file.name}",
                "line": line,
                "place": row["position"] - prompt_length + 1,  # in the response, from 1
            }
    return shown


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


def _excerpt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sign": row["sign"],
        "before": ("… " if row["position"] > TOKENS_BEFORE else "") + make_readable(row["before"]),
        "token": make_visible(row["token"]),
        "after": make_readable(row["after"]),
        **{name: row[name] for name in ("sample", "position")},
        "step": row["step"],
        "rollout": row["rollout"] + 1,
        **{name: round_to_table(row[name]) for name in _NUMBERS},
    }


def _find_samples(folder: Path, rows: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], tuple[int, int]]:
    """Return line and prompt length of the rows' samples in `samples/`, by rollout and id."""
    wanted: dict[int, set[str]] = {}
    for row in rows:
        wanted.setdefault(row["rollout"], set()).add(row["sample"])
    found: dict[tuple[int, str], tuple[int, int]] = {}
    for rollout, ids in wanted.items():
        file = _samples_file(folder, rollout)
        for number, sample in read_jsonl(file) if file.is_file() else ():
            values: dict[str, Any] = sample
            if values.get("id") in ids:
                found[rollout, values["id"]] = number, int(values.get("prompt_length", 0))
    return found


def _samples_file(folder: Path, rollout: int) -> Path:
    return folder / f"rollout_{rollout:06d}.jsonl"


def episode_trees(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return each run's rollout and its episodes as text, of runs with agents."""
    found = list[dict[str, Any]]()
    for run, name in zip(runs, names, strict=True):
        files = sorted((run.path / "samples").glob("rollout_*.jsonl"))
        has_agent = run.option("rollout.agent.harness") or run.option("rollout.agent.command")
        if files and has_agent:
            rollout = int(files[-1].stem.removeprefix("rollout_")) + 1
            found.append({"name": name, "rollout": rollout, "episodes": _longest(files[-1])})
    return found


def _longest(file: Path) -> list[dict[str, str]]:
    """Return the ids and trees of the episodes with the most calls."""
    rows: Any = (row for _, row in read_jsonl(file) if row.get("calls"))
    try:
        episodes = heapq.nlargest(MOST, rows, key=lambda row: len(row["calls"]))
        return [{"id": str(row["id"]), "tree": draw(row["calls"])} for row in episodes]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: found calls of another form ({error!r}). Restore or remove the file."
        ) from error


def draw(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the tree of calls as lines: a conversation goes straight down, branches move to the right."""
    children: dict[int | None, list[int]] = {}
    for number, call in enumerate(calls):
        children.setdefault(call["parent"], []).append(number)
    lines, roots = list[str](), children.get(None, [])
    left = [
        (root, "", root == roots[-1]) for root in reversed(roots)
    ]  # a stack: episodes have up to 10,000 calls
    while left:
        number, before, is_last = left.pop()
        lines.append(f"{before}{'└' if is_last else '├'} {number} {_described(calls[number])}")
        below = children.get(number, [])
        if len(below) == 1:
            left.append((below[0], before, is_last))
        else:
            inner = before + ("  " if is_last else "│ ")
            left += [(child, inner, child == below[-1]) for child in reversed(below)]
    return "\n".join(lines)


def _described(call: Mapping[str, Any]) -> str:
    said = " ".join(call["response"].split())
    said = said if len(said) <= _SHOWN else said[: _SHOWN - 2] + " …"
    trained = "" if call["is_trained"] else ", not trained"
    return f"{call['kind']}, {call['num_prompt_tokens']} -> {call['num_tokens']} tokens{trained}: {said}"
