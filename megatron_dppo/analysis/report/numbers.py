"""Every number of `compare` over seeds: means, paired differences and verdicts, as tables and files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.analysis.contrasts import Contrast, Estimate, contrast, estimate
from megatron_dppo.analysis.lines import Line, changed_keys, lines_of
from megatron_dppo.analysis.report.diagnostics import why_not_comparable
from megatron_dppo.analysis.report.findings import (
    Finding,
    latest_score,
    masked_share,
    scores_of,
    why_not_compared,
    why_undecided,
)
from megatron_dppo.analysis.report.summary import (
    COUNTS,
    LAST,
    ROWS,
    SummaryRow,
    format_number,
    is_speed,
    summary,
    up_to_shared,
)
from megatron_dppo.run_folder.reader import Run

MIN_PAIRS = 2
_IN_THE_REPORT: Mapping[str, str] = {  # keys of `summary` in the report's tables over seeds
    "reward_last": f"reward, last {LAST}",
    "response_length_last": f"response length, last {LAST}",
    "entropy_last": f"entropy, last {LAST}",
    "abs_prob_diff_mean": "|π − μ|",
    "kl_k3_mean": "k3 KL",
    "agreement_mean": "routing agreement",
}
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": "$|$"},
    **{"<": "$<$", ">": "$>$", "π": r"$\pi$", "μ": r"$\mu$", "→": r"$\to$", "×": r"$\times$"},
    **{"\N{MINUS SIGN}": "$-$", "\N{NARROW NO-BREAK SPACE}": r"\,", "–": "--"},
}


_BySeed = Mapping[str, Mapping[str, float | None]]  # by seed, then by `SummaryRow.key`


@dataclass(frozen=True)
class LineNumbers:
    """The numbers of one line, over the rollouts that all runs have; mappings are by `SummaryRow.key`."""

    line: Line
    by_seed: _BySeed
    means: Mapping[str, Estimate]
    differences: Mapping[str, Contrast]  # from the first line, on equal seeds; empty for the first line


@dataclass(frozen=True)
class Numbers:
    """All lines, in the runs' order; the first is the baseline."""

    rows: tuple[SummaryRow, ...]  # those that a run has
    lines: tuple[LineNumbers, ...]
    num_rollouts: int  # that all runs have
    why_undecided: str | None  # no difference is decided, whatever its interval

    def is_decided(self, difference: Contrast) -> bool:
        """Return whether the difference is decided, as the findings say."""
        return self.why_undecided is None and difference.is_decided


def numbers(runs: Sequence[Run], names: Sequence[str]) -> Numbers:
    """Return the numbers of each line, over the rollouts that all runs have.

    Lines have no differences if the runs' data or models differ, or a setting changed on the way. Seconds that
    may not be compared are left out.
    """
    shared = up_to_shared(runs)
    num_rollouts = min(len(run.rollouts) for run in shared)
    without_speed = bool(why_not_comparable(runs))
    scores = {
        name: SummaryRow(name, f"score on {name.removeprefix('eval/')}", "fraction") for name in scores_of(runs)
    }
    masked = SummaryRow("masked_mean", "masked share, mean of both signs of the advantage", "share")

    def values(run: Run) -> dict[str, float | None]:
        found = {**summary(run), masked.key: masked_share(run, num_rollouts)}
        return found | {name: latest_score(name)(run, num_rollouts) for name in scores}

    lines = lines_of(shared, names)
    known = [{seed: values(run) for seed, run in line.by_seed.items()} for line in lines]
    rows = [row for row in (*ROWS, masked, *scores.values()) if not (without_speed and is_speed(row))]
    rows = [row for row in rows if any(of[row.key] is not None for line in known for of in line.values())]
    is_compared = why_not_compared(runs, names) is None
    return Numbers(
        tuple(rows),
        tuple(
            LineNumbers(
                line,
                by_seed,
                _means(by_seed, rows),
                _differences(by_seed, known[0], rows) if is_compared and place > 0 else {},
            )
            for place, (line, by_seed) in enumerate(zip(lines, known, strict=True))
        ),
        num_rollouts,
        why_undecided(num_rollouts),
    )


def _means(by_seed: _BySeed, rows: Sequence[SummaryRow]) -> dict[str, Estimate]:
    known = {row.key: [v for of in by_seed.values() if (v := of[row.key]) is not None] for row in rows}
    return {key: estimate(values) for key, values in known.items() if values}


def _differences(
    by_seed: _BySeed,
    base: _BySeed,
    rows: Sequence[SummaryRow],
) -> dict[str, Contrast]:
    found: dict[str, Contrast] = {}
    for row in (row for row in rows if row.key not in COUNTS):
        pairs = [(of[row.key], base[seed][row.key]) for seed, of in by_seed.items() if seed in base]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if known:
            found[row.key] = contrast(*zip(*known, strict=True))
    return found


def seed_tables(found: Numbers) -> dict[str, Any] | None:
    """Return the report's tables of means and of differences, or `None` if no line has two seeds.

    A row has a `label`, and `cells` in the order of `columns`.
    """
    if max((len(of.by_seed) for of in found.lines), default=0) < MIN_PAIRS:
        return None
    has = {row.key for row in found.rows}
    keys = [key for key in _IN_THE_REPORT if key in has]
    first, *others = found.lines
    pairs = [len(first.by_seed.keys() & of.by_seed.keys()) for of in others]
    return {
        "columns": ["seeds", *(_IN_THE_REPORT[key] for key in keys)],
        "means": [
            {
                "label": of.line.label,
                "cells": [str(len(of.by_seed)), *(_shown(of.means.get(key)) for key in keys)],
            }
            for of in found.lines
        ],
        "contrasts": [
            {
                "label": f"{of.line.label} − {first.line.label}",
                "cells": [str(num_pairs), *(_shown(of.differences.get(key)) for key in keys)],
            }
            for of, num_pairs in zip(others, pairs, strict=True)
            if num_pairs >= MIN_PAIRS and of.differences
        ],
    }


def _shown(value: Estimate | Contrast | None) -> str:
    if value is None or (isinstance(value, Contrast) and value.num_pairs < MIN_PAIRS):
        return "–"
    low, high = (format_number(end, "number") for end in (value.low, value.high))
    interval = "" if math.isnan(value.low) else f" [{low}, {high}]"
    effect = value.effect_size if isinstance(value, Contrast) else math.nan
    of_effect = "" if math.isnan(effect) else f"; d {format_number(effect, 'number')}"
    return f"{format_number(value.mean, 'number')}{interval}{of_effect}"


def as_json(found: Numbers, runs: Sequence[Run], findings: Sequence[Finding], why_not: str | None) -> str:
    """Return everything: settings, values by seed, means, differences and findings. NaN is null."""
    content = {
        "num_rollouts": found.num_rollouts,
        "baseline": found.lines[0].line.label,
        "differing_settings": changed_keys(runs),
        "why_not_compared": why_not,
        "why_undecided": found.why_undecided,
        "labels": {row.key: row.label for row in found.rows},
        "lines": [
            {
                "label": of.line.label,
                "runs": {seed: str(run.path) for seed, run in of.line.by_seed.items()},
                "numbers": {row.key: _entry(found, of, row.key) for row in found.rows},
            }
            for of in found.lines
        ],
        "findings": [{"topic": of.topic, "text": of.text, "verdict": of.verdict} for of in findings],
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _entry(found: Numbers, of: LineNumbers, key: str) -> dict[str, Any]:
    mean, difference = of.means.get(key), of.differences.get(key)
    return {
        "mean": mean and _known(mean.mean),
        "low": mean and _known(mean.low),
        "high": mean and _known(mean.high),
        "num_seeds": mean.num_seeds if mean else 0,
        "by_seed": {seed: _known(values[key]) for seed, values in of.by_seed.items()},
        "difference": difference
        and {
            "mean": _known(difference.mean),
            "low": _known(difference.low),
            "high": _known(difference.high),
            "effect_size": _known(difference.effect_size),
            "num_pairs": difference.num_pairs,
            "is_decided": found.is_decided(difference),
            "seeds_to_decide": difference.seeds_to_decide,
        },
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_COLUMNS = ("line", "number", "label", "mean", "low", "high", "num_seeds")
_OF_DIFFERENCES = ("mean", "low", "high", "effect_size", "num_pairs", "is_decided", "seeds_to_decide")


def as_csv(found: Numbers) -> str:
    """Return a row for each line and number; columns `difference_*` hold the difference from the first line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"difference_{name}" for name in _OF_DIFFERENCES)])
    for of in found.lines:
        for row in found.rows:
            entry = _entry(found, of, row.key)
            difference = entry["difference"] or {}
            cells = [of.line.label, row.key, row.label, *(entry[name] for name in _COLUMNS[3:])]
            writer.writerow([*cells, *(difference.get(name) for name in _OF_DIFFERENCES)])
    return text.getvalue()


def as_latex(found: Numbers) -> str:
    """Return a `tabular` of the package booktabs: a row for each number, a column for each line."""
    lines, base = found.lines, found.lines[0].line.label
    rows = [row for row in found.rows if row.key not in COUNTS]
    body = [
        _latex_row("", [_latex(of.line.label) for of in lines]),
        _latex_row("seeds", [str(len(of.by_seed)) for of in lines]),
        r"\midrule",
        *(_latex_row(row.label, [_latex_cell(row, of.means.get(row.key)) for of in lines]) for row in rows),
    ]
    if any(of.differences for of in lines):
        pairs = [max((of.num_pairs for of in line.differences.values()), default=0) for line in lines]
        cells = [str(number) if number else "" for number in pairs]
        body += [r"\midrule", _latex_row(f"difference from {base}, pairs", cells)]
        for row in rows:
            differences = [of.differences.get(row.key) for of in lines]
            marks = ["$^{*}$" if of is not None and found.is_decided(of) else "" for of in differences]
            cells = [_latex_cell(row, of, mark) for of, mark in zip(differences, marks, strict=True)]
            body.append(_latex_row(row.label, cells))
    head = [
        r"% Written by megatron-dppo compare. Needs \usepackage{booktabs}.",
        f"% Means over seeds, and differences on equal seeds, over the first {found.num_rollouts} rollouts.",
        "% Intervals are 95 % bootstrap intervals. An asterisk marks a decided difference.",
        rf"\begin{{tabular}}{{l{'r' * len(lines)}}}",
        r"\toprule",
    ]
    return "\n".join([*head, *body, r"\bottomrule", r"\end{tabular}", ""])


def _latex_row(label: str, cells: Sequence[str]) -> str:
    return " & ".join([_latex(label), *cells]) + r" \\"


def _latex_cell(row: SummaryRow, value: Estimate | Contrast | None, mark: str = "") -> str:
    if value is None:
        return ""
    if not math.isfinite(value.mean):
        return "--"
    mean, low, high = (
        _latex(format_number(number, row.format).replace("-", "\N{MINUS SIGN}"))
        for number in (value.mean, value.low, value.high)
    )
    interval = "" if math.isnan(value.low) else rf" {{\scriptsize [{low}, {high}]}}"
    return f"{mean}{mark}{interval}"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
