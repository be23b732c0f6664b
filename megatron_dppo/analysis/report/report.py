"""`megatron-dppo compare`: renders run folders as one HTML file that opens anywhere, without a network."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.analysis.lines import Line, folder_names, lines_of, run_names, seed_of
from megatron_dppo.analysis.pages import page_templates, plotly_basic
from megatron_dppo.analysis.report.diagnostics import alarm_table, why_not_comparable
from megatron_dppo.analysis.report.findings import Finding, findings, why_not_compared
from megatron_dppo.analysis.report.mismatch_sources import mismatch_tables
from megatron_dppo.analysis.report.numbers import as_csv, as_json, as_latex, numbers, seed_tables
from megatron_dppo.analysis.report.plots import COLOURS, Section, figure
from megatron_dppo.analysis.report.samples import episode_trees, farthest, token_lists
from megatron_dppo.analysis.report.sections import agreement_table, sections
from megatron_dppo.analysis.report.summary import (
    COUNTS,
    ROWS,
    SummaryRow,
    difference,
    format_number,
    is_speed,
    num_shared,
    paired_kl_k3,
    summary,
    up_to_shared,
)
from megatron_dppo.analysis.report.text import caveats, changes_of, differences, why_missing
from megatron_dppo.analysis.report.timeline import SECTION as TIME_LINE
from megatron_dppo.analysis.report.timeline import time_line
from megatron_dppo.errors import ConfigError, DataError, Problem, writing_to
from megatron_dppo.metrics.masked_tokens import FARTHEST, TOP
from megatron_dppo.run_folder.lock import is_in_use
from megatron_dppo.run_folder.reader import Run, read_run
from megatron_dppo.runtime.files import write_whole

__all__ = ["compare", "summary"]

FEW = 4  # runs that are each named in the title, and toggled one by one
MOST_FAULTS = 3  # in a row: a file that is just being replaced reads as damaged for a moment


def compare(
    runs: Sequence[Path],
    out: Path,
    refresh_s: float = 0,
    tokens_at: int | None = None,
    data_files: Mapping[str, Path] | None = None,
) -> list[str]:
    """Write one self-contained HTML report on the runs, in their order, to `out`; return its findings.

    Args:
        runs: Run folders.
        out: The file.
        refresh_s: Seconds after which the page reloads itself; 0 never.
        tokens_at: Rollout of the masked tokens, from 1. `None` means the last one that all runs list.
        data_files: Files for the numbers, by their form: "json", "csv" or "latex".
    """
    if not runs:
        raise ConfigError("compare: found no run folder; expected one or more. Name the folders to compare.")
    resolved = [Path(path).resolve() for path in runs]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("compare: the same run folder is named twice. Name each once.")
    files = {**(data_files or {}), "out": Path(out)}
    for form, file in files.items():
        if file.is_dir():
            action = f"Name a file, such as {file / 'report.html'}."
            raise ConfigError(Problem(f"--{form}", f"{file}, a folder", "the file to write", action))
        if [other.resolve() for other in files.values()].count(file.resolve()) > 1:
            problem = Problem(f"--{form}", f"{file}, named twice", "another file for each", "Name another.")
            raise ConfigError(problem)
        with writing_to(f"--{form}", file):
            file.parent.mkdir(parents=True, exist_ok=True)
    read = [read_run(Path(path)) for path in runs]
    names = run_names(read)
    found = findings(read, names)
    html = render(read, found, files["out"].parent, refresh_s, tokens_at)
    with writing_to("--out", files["out"]):
        write_whole(files["out"], [html])
    for form, file in (data_files or {}).items():
        with writing_to(f"--{form}", file):
            write_whole(file, [_as_data(form, read, names, found)])
    return [finding.text for finding in found]


def _as_data(form: str, runs: Sequence[Run], names: Sequence[str], found: Sequence[Finding]) -> str:
    known = numbers(runs, names)
    if form == "json":
        return as_json(known, runs, found, why_not_compared(runs, names))
    return as_csv(known) if form == "csv" else as_latex(known)


def render(
    runs: Sequence[Run],
    found: Sequence[Finding],
    folder: Path,
    refresh_s: float = 0,
    tokens_at: int | None = None,
) -> str:
    """Return the report's HTML, which reloads itself every `refresh_s`; links are relative to `folder`."""
    names, shown, timeline = run_names(runs), sections(runs), time_line(runs, run_names(runs))
    toggled = toggles(runs, names)
    of_runs = looks(toggled)
    figures = {section.id: figure(section, runs, names, of_runs) for section in shown}
    figures |= {} if timeline is None else {TIME_LINE.id: timeline["figure"]}
    listed = [
        of | {"farthest": farthest(runs[of["run"]], folder, of["rollout"])}
        for of in token_lists(runs, names, tokens_at)
    ]
    page = page_templates("megatron_dppo.analysis.report").get_template("report.html.j2")
    return page.render(
        names=names,
        title=title(names, toggled),
        toggles=toggled,
        looks=of_runs,
        few=FEW,
        num_colours=COLOURS,
        findings=found,
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
        time_line=None if timeline is None else timeline | {"section": TIME_LINE},
        mismatch=mismatch_tables(runs),
        agreement_rows=agreement_table(runs),
        alarms=alarm_table(runs),
        seeds=seed_tables(numbers(runs, names)),
        token_lists=listed,
        episodes=episode_trees(runs, names),
        top=TOP,
        farthest=FARTHEST,
        caveats=caveats(runs, names),
        figures_json=_for_script({key: value for key, value in figures.items() if value is not None}),
        token_lists_json=_for_script(listed),
        plotly_js=plotly_basic(),
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
    """Return the summary's rows. Metrics that no run has, and seconds that may not be compared, are left out.

    Rows of two runs have their difference over the rollouts that both have.
    """
    summaries = [summary(run) for run in runs]
    shared = [summary(run) for run in up_to_shared(runs)] if len(runs) == 2 else []
    folders = folder_names(runs)
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
    return {"text": format_number(value, row.format), "why": why}


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


def toggles(runs: Sequence[Run], names: Sequence[str]) -> list[Line]:
    """Return what a button hides or shows: each run, or each line if there are many runs of several lines."""
    lines = lines_of(runs, names)
    if len(lines) == 1 or len(runs) <= FEW:
        return [
            Line(name, (index,), {seed_of(run): run})
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
    return [
        replace(line, label=f"{line.label} ×{len(line.places)}") if len(line.places) > 1 else line
        for line in lines
    ]


def looks(toggled: Sequence[Line]) -> list[int]:
    """Return the index of each run's toggle, which sets its colour and dash."""
    place_of = {run: place for place, toggle in enumerate(toggled) for run in toggle.places}
    return [place_of[run] for run in range(len(place_of))]


def title(names: Sequence[str], toggled: Sequence[Line]) -> str:
    """Return all names if they are few, else their number."""
    if len(names) <= FEW:
        return " · ".join(names)
    settings = "" if len(toggled) == len(names) else f" of {len(toggled)} settings"
    return f"{len(names)} runs{settings}"


def watch(
    runs: Sequence[Path],
    out: Path,
    every_s: float,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
    tokens_at: int | None = None,
    data_files: Mapping[str, Path] | None = None,
) -> list[str]:
    """Rewrite the report when a run has written, until all have ended or the user interrupts.

    The page reloads itself meanwhile; the last one written does not.

    Args:
        runs: Run folders.
        out: The report.
        every_s: Seconds between two looks.
        say: Gets a sentence for each report written, and one on the end.
        wait: Waits so many seconds.
        tokens_at: See `compare`.
        data_files: See `compare`.

    Returns:
        The findings of the last report.
    """
    seen: list[int] = []
    faults = 0
    try:
        while True:
            try:
                files = (path / "metrics.jsonl" for path in runs)
                sizes = [file.stat().st_size for file in files if file.is_file()]
                going = [path for path in runs if is_going(read_run(path))]
                if not going:
                    say("all runs have ended")
                    break
                if sizes != seen:
                    compare(runs, out, every_s, tokens_at, data_files)
                    say(f"wrote {out}: {progress(runs)}")
                seen, faults = sizes, 0
            except DataError:
                faults += 1
                if not seen or faults == MOST_FAULTS:
                    raise
            wait(every_s)
    except KeyboardInterrupt:
        say("stopped watching; the runs go on")
    return compare(runs, out, tokens_at=tokens_at, data_files=data_files)


def is_going(run: Run) -> bool:
    """Return whether more rows may come: rollouts are left, and the process is not known to have ended."""
    planned = run.option("run.num_rollouts")
    if isinstance(planned, int) and len(run.rollouts) >= planned:
        return False
    return is_in_use(run.path) is not False


def progress(runs: Sequence[Path]) -> str:
    """Return the rollouts done and planned, run by run."""
    read = [read_run(path) for path in runs]
    return ", ".join(f"{run.name} {len(run.rollouts)}/{run.option('run.num_rollouts') or '?'}" for run in read)
