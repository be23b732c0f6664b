"""Draws the lists of Appendix E: the tokens that a mask drops most often in one rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.figures.material import Kind, Lacking, Material
from megatron_dppo.analysis.figures.runs import RunCurves
from megatron_dppo.analysis.figures.style import look
from megatron_dppo.analysis.token_files import ClippedRow, read_list, rollouts_to_show
from megatron_dppo.metrics.clipped_tokens import ACTIVE, TOP

_SIGNS = {"+": "tokens with A > 0", "-": "tokens with A < 0"}
_BAR_HEIGHT = 0.15  # inches
_AXIS_HEIGHT = 0.8  # inches, of a panel without its bars


def draw(kind: Kind, material: Material) -> list[Drawing] | Lacking:
    """Draw for each line the list of its first run that has lists, of the rollout that the material names.

    Raises:
        ConfigError: A run that has lists has none of that rollout.
    """
    runs = [run for line in material.lines for run in line.runs]
    rollouts = rollouts_to_show({run.name: run.clipped for run in runs}, material.tokens_at)
    drawings: list[Drawing] = []
    for experiment in material.experiments:
        for line in experiment.lines:
            listed = [run for run in line.runs if run.name in rollouts]
            label = ", ".join(filter(None, [line.label, experiment.label]))
            if listed:
                drawn = _of_run(kind, listed[0], rollouts[listed[0].name], label, line.own_place)
                drawings += [drawn] if drawn is not None else []
    if drawings:
        return drawings
    if not rollouts:
        return Lacking("no run has a list of masked tokens", "set tracking.clipped_tokens_every")
    numbers = ", ".join(map(str, sorted(set(rollouts.values()))))
    return Lacking(f"no run's own mask dropped a token in rollout {numbers}", "name another with --tokens-at")


def _of_run(kind: Kind, run: RunCurves, rollout: int, label: str, own_place: int) -> Drawing | None:
    found = read_list(run.clipped[rollout])
    by_sign = {heading: found.of(ACTIVE, sign) for sign, heading in _SIGNS.items()}
    colour = look(run.objective, own_place=own_place)["color"]
    panels = [_panel(heading, rows, colour) for heading, rows in by_sign.items() if rows]
    if not panels:
        return None
    longest = max(map(len, by_sign.values()))
    listed = ", ".join(map(str, run.clipped))
    return Drawing(
        name=f"{kind.name}_{run.name.replace('/', '_')}",
        paper=kind.paper,
        title=f"Most frequently masked tokens of rollout {rollout}: {label}",
        panels=panels,
        caption=[
            f"{run.name}, seed {run.seed}, rollout {rollout}: the tokens (at most {TOP}) that its own mask "
            "dropped most often over the gradient steps of the rollout, for each sign of the advantage. Listed "
            f"rollouts: {listed}. --tokens-at draws another. Nothing is smoothed."
        ],
        columns=2,
        panel_height=_AXIS_HEIGHT + _BAR_HEIGHT * max(longest, 10),
    )


def _panel(heading: str, rows: Sequence[ClippedRow], colour: str) -> Callable[[Axes], None]:
    def panel(axes: Axes) -> None:
        places = range(len(rows))
        axes.barh(places, [row.count for row in rows], color=colour)
        axes.set_yticks(places, [repr(row.token) for row in rows])
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_title(heading)
        axes.set_xlabel("times masked")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False, axis="y")

    return panel
