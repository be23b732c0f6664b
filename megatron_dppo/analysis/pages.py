"""Pages of HTML from the templates of a room."""

import jinja2


def page_templates(package: str) -> jinja2.Environment:
    """The templates in a package's `templates/`; what is put in is escaped, and what is missing is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
