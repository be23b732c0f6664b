"""Renders all figures on one page that needs no other file: light or dark, and on a telephone as well."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.analysis.figures.canvas import Drawing
from megatron_dppo.analysis.pages import page_templates


@dataclass(frozen=True)
class Picture:
    """A figure with its files and caption in the gallery."""

    drawing: Drawing
    wide: bytes  # PNG
    narrow: bytes  # PNG, for screens of a telephone's width
    files: tuple[str, ...]  # beside the gallery


def gallery(pictures: Sequence[Picture], not_drawn: Sequence[str], title: str) -> str:
    """Return the page's HTML."""
    environment = page_templates("megatron_dppo.analysis.figures")
    environment.filters["data_url"] = _data_url
    page = environment.get_template("gallery.html.j2")
    return page.render(pictures=pictures, not_drawn=not_drawn, title=title)


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
