"""Captioned tables, as HTML for a notebook and as plain text for a terminal."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem.figures import html_pages

MISSING = "–"


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
    page = html_pages.table(caption, headings, rows, caption=caption, numbers=numbers)
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
