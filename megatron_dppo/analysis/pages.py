"""Renders pages of HTML from the templates of a package."""

from importlib import resources

import jinja2


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
