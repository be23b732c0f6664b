"""`megatron-dppo compare`: renders run folders as one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.analysis.pages import page_templates, plotly_basic
from megatron_dppo.analysis.report.context import farthest
from megatron_dppo.analysis.report.findings import findings, sentences
from megatron_dppo.analysis.report.mismatch import mismatch_tables
from megatron_dppo.analysis.report.names import places_of_settings, run_names, setting_names
from megatron_dppo.analysis.report.plots import COLOURS, Section, figure
from megatron_dppo.analysis.report.sections import sections
from megatron_dppo.analysis.report.seeds import seed_tables
from megatron_dppo.analysis.report.shadow import agreement_table
from megatron_dppo.analysis.report.speed import why_not_comparable
from megatron_dppo.analysis.report.stability import alarm_table
from megatron_dppo.analysis.report.summary import (
    COUNTS,
    ROWS,
    SummaryRow,
    difference,
    formatted,
    is_speed,
    num_shared,
    paired_kl_k3,
    summary,
    up_to_shared,
)
from megatron_dppo.analysis.report.text import (
    caveats,
    changes_of,
    differences,
    distinct_names,
    why_missing,
)
from megatron_dppo.analysis.report.timeline_plot import SECTION as TIME_LINE
from megatron_dppo.analysis.report.timeline_plot import time_line
from megatron_dppo.analysis.report.tokens import token_lists
from megatron_dppo.errors import ConfigError, Problem, writing_to
from megatron_dppo.metrics.clipped_tokens import TOP
from megatron_dppo.metrics.masked_tokens import FARTHEST
from megatron_dppo.run_folder.reader import Run, read_run
from megatron_dppo.runtime.files import write_whole

__all__ = ["compare", "summary"]

FEW = 4  # runs that are each named in the title, and toggled one by one


def compare(runs: Sequence[Path], out: Path, refresh_s: float = 0, tokens_at: int | None = None) -> list[str]:
    """Write one self-contained HTML report on the runs, in their order, to `out`; return its findings.

    Args:
        runs: Run folders.
        out: The file.
        refresh_s: Seconds after which the page reloads itself; 0 never.
        tokens_at: Rollout of the masked tokens, from 1. `None` means the last one that all runs list.

    Raises:
        ConfigError: No run was named, one twice, `out` cannot be written, or a run does not list that rollout.
        DataError: A folder is no run's.
    """
    if not runs:
        raise ConfigError("compare: found no run folder; expected one or more. Name the folders to compare.")
    resolved = [Path(path).resolve() for path in runs]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("compare: the same run folder is named twice. Name each once.")
    out = Path(out)
    if out.is_dir():
        found, action = f"{out}, a folder", f"Name a file, such as {out / 'report.html'}."
        raise ConfigError(Problem("--out", found, "the file to write", action))
    with writing_to("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
    read = [read_run(Path(path)) for path in runs]
    html = render(read, out.parent, refresh_s, tokens_at)
    with writing_to("--out", out):
        write_whole(out, [html])
    return sentences(findings(read, run_names(read)))


def render(runs: Sequence[Run], folder: Path, refresh_s: float = 0, tokens_at: int | None = None) -> str:
    """Return the report's HTML, which reloads itself every `refresh_s`; links are relative to `folder`."""
    names = run_names(runs)
    shown = sections(runs)
    toggled = toggles(runs, names)
    figures = {section.id: figure(section, runs, names, looks(toggled)) for section in shown}
    line = time_line(runs, names)
    if line is not None:
        figures[TIME_LINE.id] = line.pop("figure")
    listed = token_lists(runs, names, tokens_at)
    listed = [of | {"farthest": farthest(runs[of["run"]], folder, of["rollout"])} for of in listed]
    return (
        page_templates("megatron_dppo.analysis.report")
        .get_template("report.html.j2")
        .render(
            names=names,
            title=title(names, toggled),
            toggles=toggled,
            looks=looks(toggled),
            few=FEW,
            num_colours=COLOURS,
            findings=findings(runs, names),
            refresh_s=refresh_s,
            runs=[_header(run) for run in runs],
            differences=differences(runs),
            is_changed=any(run.changes for run in runs),
            summary_rows=summary_table(runs, names),
            why_no_speed=why_not_comparable(runs),
            shared=num_shared(runs),
            sections=[
                {
                    "section": section,
                    "has_plot": figures[section.id] is not None,
                    "missing": _missing(section, runs, names),
                }
                for section in shown
            ],
            time_line=None if line is None else line | {"section": TIME_LINE},
            mismatch=mismatch_tables(runs),
            agreement_rows=agreement_table(runs),
            alarms=alarm_table(runs),
            seeds=seed_tables(runs),
            token_lists=listed,
            top=TOP,
            farthest=FARTHEST,
            caveats=caveats(runs, names),
            figures_json=_for_script({key: value for key, value in figures.items() if value is not None}),
            token_lists_json=_for_script(listed),
            plotly_js=plotly_basic(),
        )
    )


def _header(run: Run) -> dict[str, Any]:
    """Return the fields of the report's head for one run."""
    argv = run.versions.get("argv") or []
    return {
        "path": str(run.path.resolve()),
        "preset": run.option("algorithm.preset"),
        "seed": run.option("run.seed"),
        "num_rollouts": len(run.rollouts),
        "planned": run.option("run.num_rollouts"),
        "changes": changes_of(run),
        "command": " ".join(map(str, argv)),
        "config": tomli_w.dumps(run.config),
    }


def summary_table(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the summary's rows, of two runs with their difference; metrics that no run has are left out.

    The difference is over the rollouts that both runs have.

    Seconds that may not be compared are left out too. The section on time has each run's seconds.
    """
    summaries = [summary(run) for run in runs]
    shared = [summary(run) for run in up_to_shared(runs)] if len(runs) == 2 else []
    folders = distinct_names(runs)
    table: list[dict[str, Any]] = []
    if folders != list(names):
        table.append({"label": "folder", "cells": [{"text": name, "why": ""} for name in folders]})
    without_speed = bool(why_not_comparable(runs))
    for row in ROWS:
        if all(values[row.key] is None for values in summaries) or (without_speed and is_speed(row)):
            continue
        cells = [_cell(row, run, values[row.key]) for run, values in zip(runs, summaries, strict=True)]
        table.append({"label": row.label, "cells": cells})
        if len(runs) == 2:
            compared = summaries if row.key in COUNTS else shared
            table[-1]["difference"] = difference(compared[0][row.key], compared[1][row.key], row.format)
    return table


def _cell(row: SummaryRow, run: Run, value: float | None) -> dict[str, str]:
    why = why_missing(run, row.metric) if value is None and row.metric else ""
    if value is not None and row.key.startswith("paired"):
        why = f"pooled over {paired_kl_k3(run)[2]:,} tokens"
    return {"text": formatted(value, row.format), "why": why}


def _missing(section: Section, runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return sentences on the section's missing metrics, runs with the same reason together."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for metric in section.metrics:
        for run, name in zip(runs, names, strict=True):
            if not _has(run, metric):
                lacking.setdefault((metric, why_missing(run, metric)), []).append(name)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (metric, why), of_runs in lacking.items():
        merged.setdefault((why, tuple(of_runs)), []).append(metric)
    return [f"{', '.join(of)}: no {' or '.join(metrics)}: {why}." for (why, of), metrics in merged.items()]


def _has(run: Run, metric: str) -> bool:
    rows = (*run.rollouts, *run.steps, *run.evaluations)
    if "<n>" not in metric:
        return any(metric in row.values for row in rows)
    pattern = re.compile(re.escape(metric).replace("<n>", r"\d+"))
    return any(pattern.fullmatch(name) for row in rows for name in row.values)


def _for_script(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


@dataclass(frozen=True)
class Toggle:
    """Runs that one button hides or shows; its index is its colour and dash."""

    label: str
    runs: tuple[int, ...]  # places in the report's order


def toggles(runs: Sequence[Run], names: Sequence[str]) -> list[Toggle]:
    """Return one toggle for each run; of many runs of several settings, one for each setting."""
    by_setting = places_of_settings(runs)
    if len(by_setting) == 1 or len(runs) <= FEW:
        return [Toggle(name, (index,)) for index, name in enumerate(names)]
    return [
        Toggle(f"{name} ×{len(of)}" if len(of) > 1 else name, tuple(of))
        for name, of in zip(setting_names(runs, names), by_setting, strict=True)
    ]


def looks(toggled: Sequence[Toggle]) -> list[int]:
    """Return the index of each run's toggle."""
    place_of = {run: place for place, toggle in enumerate(toggled) for run in toggle.runs}
    return [place_of[run] for run in range(len(place_of))]


def title(names: Sequence[str], toggled: Sequence[Toggle]) -> str:
    """Return all names if they are few, else their number."""
    if len(names) <= FEW:
        return " · ".join(names)
    settings = "" if len(toggled) == len(names) else f" of {len(toggled)} settings"
    return f"{len(names)} runs{settings}"
