"""Draws a figure as panels on a grid under one legend, for a page's width and for a telephone's."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron_dppo.analysis.figures.style import RC

Format = Literal["png", "svg"]
_METADATA = {"png": {"Software": None}, "svg": {"Date": None}}
_LEGEND_ROW = 0.17  # inches
_WIDEST_PANEL = 4.5  # inches


@dataclass(frozen=True)
class Page:
    """Size and resolution that a figure is drawn for."""

    width: float  # inches
    most_columns: int
    num_characters: int  # of a line across it
    dots_per_inch: int


WIDE = Page(width=7.0, most_columns=4, num_characters=100, dots_per_inch=160)
NARROW = Page(width=3.5, most_columns=1, num_characters=48, dots_per_inch=140)


@dataclass(frozen=True)
class Drawing:
    """One figure and its caption."""

    name: str  # file name without its ending
    paper: str  # its number in the paper
    title: str
    panels: Sequence[Callable[[Axes], None]]
    caption: Sequence[str]  # sentences
    columns: int = 3  # on a wide page
    panel_height: float = 1.75  # inches
    runs: tuple[str, ...] = ()  # names of the runs that it draws, and of runs that a later seed replaced


def build(drawing: Drawing, page: Page = WIDE, headline: str = "") -> Figure:
    """Draw the drawing on a page, with the headline over its title."""
    if len(drawing.panels) == 1 and page.width > _WIDEST_PANEL:
        num_characters = int(page.num_characters * _WIDEST_PANEL / page.width)
        page = replace(page, width=_WIDEST_PANEL, num_characters=num_characters)
    columns = min(drawing.columns, page.most_columns, len(drawing.panels))
    rows = -(-len(drawing.panels) // columns)
    columns = -(-len(drawing.panels) // rows)  # no row is left nearly empty
    with matplotlib.rc_context(dict(RC)):
        engine = ConstrainedLayoutEngine()
        figure = Figure(layout=engine)
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        for place, draw in zip(places, drawing.panels, strict=False):
            draw(place)
            place.set_title(textwrap.fill(place.get_title(), page.num_characters // columns))
        for place in places[len(drawing.panels) :]:
            place.set_axis_off()
        lines = [
            line for text in (headline, drawing.title) for line in textwrap.wrap(text, page.num_characters)
        ]
        figure.suptitle("\n".join(lines))
        num_legend_rows = _add_legend(figure, page)
        extra = _LEGEND_ROW * (num_legend_rows + len(lines)) + 0.1
        figure.set_size_inches(page.width, rows * drawing.panel_height + extra)
        engine.execute(figure)
        figure.set_layout_engine("none")  # each rendering would seek the same places again
    return figure


def _add_legend(figure: Figure, page: Page) -> int:
    """Add one entry for each label that a panel has; return the rows that the legend takes."""
    entries: dict[str, Artist] = {}
    for place in figure.axes:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return 0
    longest = max(map(len, entries)) + 6  # the handle
    columns = max(1, min(len(entries), page.num_characters // longest))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)
    return -(-len(entries) // columns)


def render(figure: Figure, kind: Format, page: Page = WIDE) -> bytes:
    """Return the file's bytes; the same figure gives the same ones."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(dict(RC)):
        figure.savefig(buffer, format=kind, dpi=page.dots_per_inch, metadata=_METADATA[kind])
    return buffer.getvalue()
