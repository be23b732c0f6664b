"""Renders pages of HTML from the templates of a package."""

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
