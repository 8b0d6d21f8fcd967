"""Bars made of parts: bytes by where they are, seconds by what they were spent on.

    stacked_bars({"in memory": {"device": 4 << 30}, "on disk": {"disk": 4 << 30}})

What these bars share with those of runs and formulas is here, too.

Limits: bars are to scale, so beside one a thousand times longer another is a hairline; the table
still has its numbers. Meant for up to six parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.show.picture import (
    EDGE,
    GREY,
    INK,
    LIMIT_LINE,
    LINE_COLOURS,
    PAPER,
    Picture,
    note,
    one_line,
    scale,
)
from labkit.show.tables import finite_number, seconds_text
from labkit.support.html_table import MISSING
from labkit.values import InputError, format_bytes

__all__ = ["seconds_text", "stacked_bars"]

HATCHES = ("", "///", "...", "\\\\\\", "---", "xxx")
MOST_PARTS = len(HATCHES)
HEIGHT = 0.62  # of a bar; a row is 1


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    write: Callable[[float], str] = format_bytes,
    source: str = "",
) -> Picture:
    """Show what each bar is made of, with the numbers in a table beneath.

    Args:
        bars: for each bar's name its parts: how much of what. A part may be missing.
        title: what the figure shows.
        write: how an amount is written; `seconds_text` for seconds.
        source: where the numbers come from.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no bars, more than six parts, or an amount that is negative or no number.
    """
    names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    if not 1 <= len(names) <= MOST_PARTS:
        raise InputError(f"pass {{bar: {{part: amount}}}} with 1 to {MOST_PARTS} parts: {names}")
    for bar, amounts in bars.items():
        for name, amount in amounts.items():
            if finite_number(amount, f"{name} of {bar!r}") < 0:
                raise InputError(f"{name} of {bar!r} must not be negative: {amount}")
    styles = {
        name: {"facecolor": colour, "hatch": hatch, "zorder": 3, **EDGE}
        for name, colour, hatch in zip(names, LINE_COLOURS, HATCHES, strict=False)
    }
    legend = [Patch(label=name, **style) for name, style in styles.items()]
    rows = []
    figure = Picture(title, source, body=50 + 42 * len(bars), legend=legend, columns=MOST_PARTS)
    with figure.drawing() as axes:
        for y, (bar, amounts) in enumerate(bars.items()):
            total = write(sum(amounts.values()))
            present = {name: amounts[name] for name in names if name in amounts}
            write_total(axes, total, draw_stack(axes, y, present, styles), y)
            cells = [write(amounts[name]) if name in amounts else MISSING for name in names]
            rows.append([bar, *cells, total])
        most = max(sum(amounts.values()) for amounts in bars.values())
        scale_bars(axes, [one_line(bar, 34) for bar in bars], most, write)
    figure.describe("Stacked bars", ["", *names, "together"], rows)
    return figure.show()


# --- shared by all bars --------------------------------------------------------------------------


def draw_stack(
    axes: Axes, y: float, parts: Mapping[Any, float], styles: Mapping[Any, Mapping[str, Any]]
) -> float:
    """Draw one bar, its parts one after the other, and return where it ends."""
    start = 0.0
    for name, amount in parts.items():
        axes.barh(y, amount, left=start, height=HEIGHT, **styles[name])
        start += amount
    return start


def write_total(axes: Axes, text: str, end: float, y: float, **style: Any) -> None:
    """Write a text behind the end of a bar; the figure makes room for it."""
    style = {"size": 10.5, "weight": "bold", **style}
    note(axes, text, (end, y), (8, 0), va="center", bbox=PAPER, zorder=6, **style)


def scale_bars(
    axes: Axes, names: Sequence[str], most: float, write: Callable[[float], str] = format_bytes
) -> None:
    """Name the bars, the first at the top, and let the axis end at ``most``."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, most or 1)
    axes.spines["left"].set(color="#777777", zorder=5)
    axes.grid(axis="x")
    scale(axes.xaxis, write, 5)


def capacity_line(axes: Axes, device: str, capacity_bytes: int) -> None:
    """Draw what a device can hold as a line; where it is far off, as text at the edge."""
    high = axes.get_xlim()[1]
    text = f"{device} can hold {format_bytes(capacity_bytes)}"
    place = {"xycoords": axes.get_xaxis_transform(), "ha": "right"}
    if capacity_bytes > 4 * high:
        note(axes, f"{text} →", (high, 1), (0, 5), color=GREY, **place)
        return
    axes.set_xlim(0, max(high, 1.04 * capacity_bytes))
    axes.axvline(capacity_bytes, zorder=4, **LIMIT_LINE)
    if capacity_bytes < axes.get_xlim()[1] / 2:
        place["ha"] = "left"
    note(axes, text, (capacity_bytes, 1), (0, 5), **place)
