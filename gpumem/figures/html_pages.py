"""HTML from jinja2 templates, which escape what is not ``Markup``; tables as text, too."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup

from gpumem.files import SOURCE

#: For ``<meta http-equiv="Content-Security-Policy">``: a page that shows what is in it, no more.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
#: What a cell says where there is nothing to say.
MISSING = "–"


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


@dataclass(frozen=True)
class Rich:
    """HTML for a notebook and the same in plain text for everywhere else."""

    html: str
    text: str

    def __add__(self, other: "Rich") -> "Rich":
        return Rich(self.html + other.html, f"{self.text}\n\n{other.text}")

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}


def folded(shown: Rich, summary: str) -> Rich:
    """Return what is shown in a box that opens with a click on ``summary``; as plain text, open."""
    box = '<details><summary style="cursor:pointer">{}</summary>{}</details>'
    return Rich(str(Markup(box).format(summary, Markup(shown.html))), shown.text)


def grid(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    text_columns: Collection[int] = (0,),
) -> Rich:
    """Return a captioned table. The first cell of each row is its heading.

    ``text_columns`` (from 0) hold text; all others are numbers, aligned right.
    """
    numbers = set(range(len(headings))) - set(text_columns)
    page = table(caption, headings, rows, caption=caption, numbers=numbers)
    lines = [[" ".join(text.split()) for text in row] for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = []
    for line in lines:
        cells = [
            text.ljust(width) if i in text_columns else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        padded.append("  ".join(cells))
    text = "\n".join([caption, padded[0], "-" * len(padded[0]), *padded[1:]])
    return Rich(str(page), text)
