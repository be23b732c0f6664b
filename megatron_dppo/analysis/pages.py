"""Renders pages of HTML from the templates of a package, and tables for a terminal."""

from collections.abc import Sequence
from importlib import resources

import jinja2
import typer


def page_templates(package: str) -> jinja2.Environment:
    """Load the templates in a package's `templates/`; values are escaped, and a missing one is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def plotly_basic() -> str:
    """Return the JavaScript of plotly.js for scatter, bar and pie traces, to embed in a page."""
    file = resources.files("megatron_dppo.analysis") / "vendored" / "plotly-basic.min.js"
    return file.read_text(encoding="utf-8")


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    typer.echo(f"\n{title}")
    for row in (header, *rows):
        first, *others = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        typer.echo("  ".join([first, *others]).rstrip())
