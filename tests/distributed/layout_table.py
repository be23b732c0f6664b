"""The table layout x feature -> worst relative error in megatron_dppo/actor/LAYOUTS.md, as it was measured."""

from collections.abc import Iterator
from pathlib import Path

from tests.support.layout_cases import FEATURES, LAYOUTS, Case, cases, layouts_of

FILE = Path(__file__).parents[2] / "megatron_dppo" / "actor" / "LAYOUTS.md"
BEGIN, END = "<!-- layouts: written by `make layouts` -->", "<!-- end of layouts -->"
VALUES = [(feature, value) for feature, of in FEATURES.items() for value in of]


def worst_of(errors: dict[str, dict[str, float]]) -> float:
    """The largest relative error of the loss, a gradient tensor or an update."""
    return max(errors["metrics"]["loss/policy"], *errors["gradients"].values(), *errors["updates"].values())


def write_table(measured: list[tuple[Case, float]]) -> None:
    """Replace the rows of layouts whose cases were all measured; others stay, under the same columns."""
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    FILE.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{after}")


def table(measured: list[tuple[Case, float]]) -> str:
    """Markdown: a row for each layout, a column for each value of each feature."""
    head = _line(["layout", "processes", *(f"{feature} {value}" for feature, value in VALUES)])
    lines = [head, "|---" * (2 + len(VALUES)) + "|"]
    kept = {key: line for key, line in _written() if head in FILE.read_text()}
    for world_size in LAYOUTS:
        needed = list(cases(world_size))
        for name in layouts_of(world_size):
            own = [pair for pair in measured if (pair[0].name, pair[0].world_size) == (name, world_size)]
            known, key = [case for case, _ in own], (name, str(world_size))
            if all(case in known for case in needed if case.name == name):
                cells = [_cell([e for case, e in own if case.features[f] == value]) for f, value in VALUES]
                lines.append(_line([*key, *cells]))
            elif key in kept:
                lines.append(kept[key])
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(errors: list[float]) -> str:
    return f"{max(errors):.1e}" if errors else "no routes"


def rows() -> Iterator[tuple[str, str]]:
    """(layout, processes) of the file's table."""
    yield from (key for key, _ in _written())


def _written() -> Iterator[tuple[tuple[str, str], str]]:
    """((layout, processes), line) of the file's table."""
    text = FILE.read_text().partition(BEGIN)[2].partition(END)[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2 and cells[2].isdigit():
            yield (cells[1], cells[2]), line
