"""Pages of HTML from jinja2 templates, which escape every value that is not ``Markup``."""

import functools
from typing import Any

import jinja2
from markupsafe import Markup

from gpumem.files import SOURCE

#: For ``<meta http-equiv="Content-Security-Policy">``: a page that shows what is in it, no more.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(SOURCE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """Return what a template, named by its path below the package, makes of ``values``."""
    return _templates().get_template(template).render(POLICY=Markup(POLICY), **values)


def table(label: str, columns: Any, rows: Any, **options: Any) -> Markup:
    """Return the ``table`` of ``templates/parts.html.j2``, for a notebook."""
    parts = _templates().get_template("gpumem/figures/templates/parts.html.j2").module
    return parts.table(label, columns, rows, **options)
