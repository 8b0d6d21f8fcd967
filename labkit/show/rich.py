"""A piece of HTML with the same in plain text, and captioned tables made of it.

Limits: everything in a table is text, escaped; there are no links and no pictures in cells.
"""

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.readable import scrolling

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
    words: Collection[int] = (0,),
) -> Rich:
    """A captioned table. The first cell of each row is its heading.

    Args:
        headings: one per column.
        rows: texts, as many per row as there are headings.
        caption: what the numbers are and where they come from.
        words: which columns (from 0) hold words; all others are numbers, aligned right.
    """
    return Rich(
        _grid_html(headings, rows, caption, words), _grid_text(headings, rows, caption, words)
    )


def _grid_html(
    headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str, words: Collection[int]
) -> str:
    def cell(tag: str, text: str, column: int, scope: str = "") -> str:
        side = "left" if column in words else "right"
        where = f' scope="{scope}"' if scope else ""
        # Numbers stay whole; a long name wraps, or it would push the last columns out of sight.
        wrap = "nowrap"
        if scope == "row":  # in lines of some length, where the table has more columns than room
            wrap = f"normal;max-width:190px;min-width:{min(len(text), 16)}ch"
        style = f"text-align:{side};padding:3px 9px;line-height:1.35;white-space:{wrap}"
        return f'<{tag}{where} style="{style}">{html.escape(text)}</{tag}>'

    head = "".join(
        cell("th", text, i, "col") if text else "<td></td>" for i, text in enumerate(headings)
    )
    body = "".join(
        "<tr>"
        + cell("th", row[0], 0, "row")
        + "".join(cell("td", text, i) for i, text in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    return scrolling(
        '<table style="border-collapse:collapse;margin:6px 0">'
        '<caption style="caption-side:top;text-align:left;padding:3px 9px">'
        f"{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>",
        caption,
    )


def _grid_text(
    headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str, words: Collection[int]
) -> str:
    lines = [[" ".join(str(text).split()) for text in row] for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(
            text.ljust(width) if i in words else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([caption, padded[0], "-" * len(padded[0]), *padded[1:]])
