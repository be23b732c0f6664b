"""The study's report: tables and words in report.md, the same with curves in report.html."""

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.io
from study_grid import Block, Cell, Grid
from study_pictures import AGAINST
from study_results import FIGURES, CellResult, Finding

from megatron_dppo.analysis.contrasts import Estimate, estimate

TITLE = "Miniature study: a tiny model on a toy task"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: auto; padding: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Table:
    """A heading over columns; the first one is text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_report(
    out: Path, grid: Grid, results: Mapping[Cell, CellResult], found: Sequence[Finding], facts: Sequence[str]
) -> None:
    """Write both files.

    Args:
        out: The study's folder.
        grid: What was asked for.
        results: What came of it.
        found: The expectations, with what came out.
        facts: Sentences on what was run, at the top.
    """
    parts: list[tuple[str, Any]] = [("words", facts), ("heading", "What reproduced, and what did not")]
    parts += [("words", [_sentence(finding) for finding in found]), ("table", _of_findings(found))]
    for block in grid.blocks:
        parts += [("heading", block.title), ("table", _of_block(block, results))]
        parts += [("plot", figure(block, results))]
        if block.against is not None:
            parts += [("plot", figure_against(block, block.against, grid, results))]
    parts += [("words", _READING)]
    (out / "report.md").write_text(f"# {TITLE}\n\n" + "\n\n".join(_as_markdown(parts)) + "\n")
    body = "\n".join(_as_html(parts))
    (out / "report.html").write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{TITLE}</h1>{body}</body></html>\n",
        encoding="utf-8",
    )


_READING = (
    "Means over seeds, with 95 % bootstrap intervals in brackets: none where fewer than two seeds finished. "
    "A run counts as collapsed where the mean reward of its last 10 rollouts is below half of the best such "
    "mean before. Differences are taken seed by seed. All runs share one warm start: the intervals say nothing "
    "about another. This is one tiny model on one toy task; it supports no claim about large models.",
)


def _sentence(finding: Finding) -> str:
    return f"{finding.expectation.text}: {finding.outcome}."


def _of_findings(found: Sequence[Finding]) -> Table:
    rows: list[list[str]] = []
    for each in found:
        expected, difference = each.expectation, each.difference
        cells = [f"{expected.above} - {expected.below}", FIGURES[expected.metric]]
        if difference is None:
            rows.append([*cells, "-", "-", "-"])
        else:
            shown = Estimate(difference.mean, difference.low, difference.high, difference.num_pairs)
            effect = "-" if math.isnan(difference.effect_size) else f"{difference.effect_size:+.2f}"
            rows.append([*cells, _shown(shown), effect, str(difference.num_pairs)])
    return Table(("difference", "of", "mean", "effect size d_z", "seeds"), rows)


def _of_block(block: Block, results: Mapping[Cell, CellResult]) -> Table:
    rows: list[list[str]] = []
    for cell in block.cells:
        result = results[cell]
        figures = [_shown(result.figure(name)) for name in FIGURES]
        rows.append([str(cell), str(len(result.runs)), f"{result.num_collapsed}/{len(result.runs)}", *figures])
    return Table(("setting/algorithm", "seeds", "collapsed", *FIGURES.values()), rows)


def _shown(value: Estimate) -> str:
    if math.isnan(value.mean):
        return "-"
    interval = "" if math.isnan(value.low) else f" [{value.low:.3g}, {value.high:.3g}]"
    return f"{value.mean:.3g}{interval}"


def _as_markdown(parts: Sequence[tuple[str, Any]]) -> Iterator[str]:
    for kind, content in parts:
        if kind == "heading":
            yield f"## {content}"
        elif kind == "words":
            yield "\n".join(f"- {sentence}" for sentence in content)
        elif kind == "table":
            lines = [content.columns, ["---"] * len(content.columns), *content.rows]
            escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
            yield "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def _as_html(parts: Sequence[tuple[str, Any]]) -> Iterator[str]:
    has_library = False
    for kind, content in parts:
        if kind == "heading":
            yield f"<h2>{html.escape(content)}</h2>"
        elif kind == "words":
            yield "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in content) + "</ul>"
        elif kind == "table":
            head = "".join(f"<th>{html.escape(name)}</th>" for name in content.columns)
            rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in content.rows)
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            yield f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
        else:
            yield plotly.io.to_html(content, include_plotlyjs=not has_library, full_html=False)
            has_library = True


def figure(block: Block, results: Mapping[Cell, CellResult]) -> dict[str, Any]:
    """Reward over rollouts: a panel for each setting, a line for each algorithm, a band of its interval."""
    settings = list(dict.fromkeys(cell.setting for cell in block.cells))
    algorithms = list(dict.fromkeys(cell.algorithm for cell in block.cells))
    layout = _panels(settings, "rollout")
    layout["yaxis"]["title"] = {"text": "reward"}
    data: list[dict[str, Any]] = []
    for place, setting in enumerate(settings):
        axis = _axis(place)
        layout[f"yaxis{axis}"]["range"] = [0, 1]
        for algorithm in algorithms:
            runs = results[Cell(setting, algorithm)].runs
            colour = _COLOURS[algorithms.index(algorithm) % len(_COLOURS)]
            if runs:
                rewards = [run.rewards for run in runs]
                data += _curve(rewards, algorithm, colour, axis, has_label=place == 0)
    return {"data": data, "layout": layout}


def figure_against(block: Block, key: str, grid: Grid, results: Mapping[Cell, CellResult]) -> dict[str, Any]:
    """Figures over a number of the settings: a panel for each figure, a line for each algorithm."""
    algorithms = list(dict.fromkeys(cell.algorithm for cell in block.cells))
    layout = _panels([FIGURES[name] for name in AGAINST], key)
    data: list[dict[str, Any]] = []
    for place, name in enumerate(AGAINST):
        axis = _axis(place)
        for algorithm, colour in zip(algorithms, itertools.cycle(_COLOURS), strict=False):
            cells = [cell for cell in block.cells if cell.algorithm == algorithm and results[cell].runs]
            points = sorted((grid.number(cell.setting, key), results[cell].figure(name)) for cell in cells)
            means = [point.mean for _, point in points]
            highs, lows = ([getattr(point, end) for _, point in points] for end in ("high", "low"))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [number for number, _ in points],
                    "y": means,
                    "error_y": {
                        "type": "data",
                        "symmetric": False,
                        "array": [high - mean for high, mean in zip(highs, means, strict=True)],
                        "arrayminus": [mean - low for low, mean in zip(lows, means, strict=True)],
                    },
                    "name": algorithm,
                    "line": {"color": colour, "width": 2},
                    "showlegend": place == 0,
                    "legendgroup": algorithm,
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                }
            )
    return {"data": data, "layout": layout}


def _panels(titles: Sequence[str], of_x: str) -> dict[str, Any]:
    """The layout of panels side by side."""
    width = 1 / len(titles)
    layout: dict[str, Any] = {
        "template": "plotly_white",
        "height": 420,
        "legend": {"orientation": "h", "y": -0.2},
        "annotations": [],
    }
    for place, title in enumerate(titles):
        axis = _axis(place)
        layout[f"xaxis{axis}"] = {
            "domain": [place * width, (place + 0.86) * width],
            "title": {"text": of_x},
            "anchor": f"y{axis}",
        }
        layout[f"yaxis{axis}"] = {"anchor": f"x{axis}"}
        layout["annotations"].append(
            {
                "text": title,
                "x": (place + 0.43) * width,
                "y": 1.08,
                "xref": "paper",
                "yref": "paper",
                "showarrow": False,
            }
        )
    return layout


def _axis(place: int) -> str:
    return "" if place == 0 else str(place + 1)


def _curve(
    rewards: Sequence[Sequence[float]], name: str, colour: str, axis: str, *, has_label: bool
) -> Iterator[dict[str, Any]]:
    length = min(map(len, rewards))
    values = np.asarray([of_run[:length] for of_run in rewards])
    points = [estimate(column.tolist()) for column in values.T]
    x = list(range(length))
    place = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "legendgroup": name}
    if len(rewards) > 1:
        band = {"x": x + x[::-1], "y": [p.high for p in points] + [p.low for p in points][::-1]}
        fill = {"fill": "toself", "fillcolor": colour, "opacity": 0.15, "line": {"width": 0}}
        yield {
            "type": "scatter",
            **band,
            **fill,
            "mode": "lines",
            "hoverinfo": "skip",
            "showlegend": False,
        } | place
    yield {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": [p.mean for p in points],
        "name": name,
        "line": {"color": colour, "width": 2},
        "showlegend": has_label,
    } | place
