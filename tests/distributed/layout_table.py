"""The table layout x feature -> worst relative error in megatron_dppo/actor/LAYOUTS.md, as it was measured."""

from collections.abc import Iterator
from pathlib import Path

from layout_cases import FEATURES, LAYOUTS, Case, layouts_of

FILE = Path(__file__).parents[2] / "megatron_dppo" / "actor" / "LAYOUTS.md"
BEGIN, END = "<!-- layouts: written by `make layouts` -->", "<!-- end of layouts -->"


def worst_of(errors: dict[str, dict[str, float]]) -> float:
    """The largest relative error of the loss, a gradient tensor or an update."""
    return max(errors["metrics"]["loss/policy"], *errors["gradients"].values(), *errors["updates"].values())


def write_table(measured: list[tuple[Case, float]]) -> None:
    """Replace the table in the file."""
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    FILE.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{after}")


def table(measured: list[tuple[Case, float]]) -> str:
    """Markdown: a row for each layout, a column for each value of each feature."""
    values = [(feature, value) for feature, of in FEATURES.items() for value in of]
    head = ["layout", "processes", *(f"{feature} {value}" for feature, value in values)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for world_size in LAYOUTS:
        for name in layouts_of(world_size):
            own = [
                (case, error) for case, error in measured if (case.name, case.world_size) == (name, world_size)
            ]
            cells = [_cell([e for case, e in own if case.features[f] == value]) for f, value in values]
            lines.append("| " + " | ".join([name, str(world_size), *cells]) + " |")
    return "\n".join(lines)


def _cell(errors: list[float]) -> str:
    return f"{max(errors):.1e}" if errors else "no routes"


def rows() -> Iterator[tuple[str, str]]:
    """(layout, processes) of the file's table."""
    text = FILE.read_text().partition(BEGIN)[2].partition(END)[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2 and cells[2].isdigit():
            yield cells[1], cells[2]
