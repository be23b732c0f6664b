"""Draws Appendix E as a figure: the tokens that a mask drops most often."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.runs import RunCurves
from megatron_dppo.analysis.figures.style import look
from megatron_dppo.analysis.token_files import ClippedRow, own_rows

MOST_TOKENS = 20  # of each sign
_SIGNS = {"+": "tokens with A > 0", "-": "tokens with A < 0"}


def draw(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw for each line the last list with a dropped token of its first run that has lists."""
    drawings: list[Drawing] = []
    for experiment in material.experiments:
        for line in experiment.lines:
            listed = [run for run in line.runs if run.clipped]
            label = ", ".join(filter(None, [line.label, experiment.label]))
            if listed and (drawing := _of_run(kind, listed[0], label, line.own_place)):
                drawings.append(drawing)
    return drawings or Lacking(
        "no run has a list of masked tokens, or its mask dropped none", "set tracking.clipped_tokens_every"
    )


def _of_run(kind: Kind, run: RunCurves, label: str, own_place: int) -> Drawing | None:
    lists = ((step, own_rows(file)) for step, file in reversed(list(run.clipped.items())))
    step, rows = next(((step, rows) for step, rows in lists if rows), (0, []))
    by_sign = {heading: [row for row in rows if row.sign == sign] for sign, heading in _SIGNS.items()}
    panels = [
        _panel(heading, of, look(run.objective, own_place=own_place)["color"])
        for heading, of in by_sign.items()
        if of
    ]
    if not panels:
        return None
    return Drawing(
        name=f"{kind.name}_{run.name.replace('/', '_')}",
        paper=kind.paper,
        title=f"Most frequently masked tokens: {label}",
        panels=panels,
        caption=[
            f"{run.name}, seed {run.seed}, gradient step {step}: the {MOST_TOKENS} tokens that its own mask "
            "dropped most often, for each sign of the advantage. Nothing is smoothed."
        ],
        columns=2,
        panel_height=3.0,
    )


def _panel(heading: str, rows: Sequence[ClippedRow], colour: str) -> Callable[[Axes], None]:
    shown = rows[:MOST_TOKENS]

    def panel(axes: Axes) -> None:
        places = range(len(shown))
        axes.barh(places, [row.count for row in shown], color=colour)
        axes.set_yticks(places, [repr(row.token) for row in shown])
        axes.invert_yaxis()
        axes.set_title(heading)
        axes.set_xlabel("times masked")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False, axis="y")

    return panel
