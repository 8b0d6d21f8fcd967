"""A scatter plot: two quantities of several things, such as memory and last loss of optimizers.

    scatter({"AdamW": (run.peak_bytes, losses.final)}, "peak", "last loss")

Each dot is numbered; the legend names the numbers.

Limits: meant for up to some twenty dots. Dots at one and the same spot hide each other, numbers of
neighbours may overlap; marker, colour and the table still distinguish them.
"""

import math
from collections.abc import Callable, Mapping

from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from labkit.show.picture import (
    INK,
    LINE_COLOURS,
    LINE_MARKERS,
    Picture,
    against,
    name_axes,
    note,
    scale,
)
from labkit.support.html_table import MISSING
from labkit.values import InputError, format_bytes


def write_number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.3g}"


def scatter(
    points: Mapping[str, tuple[float | None, float | None]],
    x_label: str,
    y_label: str,
    *,
    title: str | None = None,
    source: str = "",
    write_x: Callable[[float], str] = format_bytes,
    write_y: Callable[[float], str] = write_number,
) -> Picture:
    """Show things as numbered dots, with their names above and their numbers in a table beneath.

    Args:
        points: for each name its ``(x, y)``. A number that could not be had (None, or a loss that
            is not finite) leaves the thing out of the figure, with a dash in the table.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        title: what the figure shows; None: "<y_label> against <x_label>".
        source: where the numbers come from, such as ``run.label``.
        write_x: turns an x into text; the default takes bytes.
        write_y: turns a y into text; the default writes three significant digits.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no pair has two numbers.
    """
    rows, dots = [], []
    for name, point in points.items():
        x, y = (v if v is not None and math.isfinite(v) else None for v in point)
        cells = [MISSING if x is None else write_x(x), MISSING if y is None else write_y(y)]
        rows.append([str(name), *cells])
        if x is not None and y is not None:
            number = len(dots)
            dot = Line2D([x], [y], linestyle="", markersize=9, markeredgecolor=INK, zorder=4)
            dot.set_marker(LINE_MARKERS[number % len(LINE_MARKERS)])
            dot.set_color(LINE_COLOURS[number % len(LINE_COLOURS)])
            dot.set_label(f"{number + 1}  {name}")
            dots.append(dot)
    if not dots:
        raise InputError("there are no dots to draw: pass {name: (x, y)} with numbers in it")
    title = title or against(y_label, x_label)
    columns = 2 if max(map(len, points)) > 28 else 3
    figure = Picture(title, source, body=380, legend=dots, columns=columns)
    with figure.drawing() as axes:
        for number, dot in enumerate(dots, start=1):
            axes.add_line(dot)
            [(x, y)] = dot.get_xydata()
            halo = withStroke(linewidth=3, foreground="white")
            style = {"weight": "bold", "ha": "center", "zorder": 5, "path_effects": [halo]}
            offset = (10, 5) if number % 2 else (-10, -12)  # neighbours often follow each other
            note(axes, str(number), (x, y), offset, **style)
        axes.margins(0.12)
        axes.autoscale_view()
        scale(axes.xaxis, write_x)
        scale(axes.yaxis, write_y)
        axes.minorticks_off()
        name_axes(axes, x_label, y_label)
    figure.describe("Scatter plot", ["", x_label, y_label], rows)
    return figure.show()
