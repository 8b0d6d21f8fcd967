"""Bytes with their units, and tables in text."""

from collections.abc import Iterable, Sequence
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def as_printed(found: Any, printer: Any, cycle: bool) -> None:
    """Show it in a notebook as `print` writes it: a dataclass's ``_repr_pretty_``."""
    printer.text(str(found))


def format_bytes(nbytes: int | float) -> str:
    """Return ``nbytes`` with a binary unit: ``"1.50 GiB"``, ``"212 MiB"``, ``"512 B"``.

    Picks the unit so that something other than zero always shows.
    """
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale * 0.9995:
            value = size / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table in columns as wide as needed; all but the last are flush right."""
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings) - 1)]
    lines = []
    for row in table:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]))
    return lines
