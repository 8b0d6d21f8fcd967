"""Lines: one quantity against another, such as the peak against the batch size.

Limits: meant for a handful of lines; from the eighth on, colours repeat.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from gpumem.figures.drawing import (
    COLOURS,
    GREY,
    LIMIT_LINE,
    LINE_MARKERS,
    Picture,
    against,
    line_style,
    name_axes,
    scale,
)
from gpumem.figures.html_pages import MISSING
from gpumem.inputs import InputError
from gpumem.units import format_bytes

TABLE_ROWS = 12
MOST_MARKERS = 40  # of points in a line; more would hide it


def lines(
    series: Mapping[str, Mapping[float, float | None]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    title: str | None = None,
    source: str = "",
    limit: float | None = None,
    limit_label: str = "capacity",
    write: Callable[[float], str] = format_bytes,
    under: Mapping[str, Sequence[float]] | None = None,
) -> Picture:
    """Show one or more lines, with the numbers in a table beneath.

    Args:
        series: for each line's name its points, ``{x: y}``; None for a y that could not be
            had (out of memory): a gap in the line, a dash in the table. A line named after
            a category has the category's colour; "A in B" beside a line "A" is that one dashed.
        x_label: what x is, with its unit.
        y_label: what y is.
        log: both axes logarithmic, so that "twice as much" is the same distance everywhere
            and a power law is straight. Needs numbers above zero.
        title: what the figure shows; None: "<y_label> against <x_label>".
        source: where the numbers come from, such as ``run.label``.
        limit: where to draw a horizontal line, unless it is far above all others.
        limit_label: what to call that line.
        write: turns a y into text; the default takes bytes.
        under: rows of numbers to write beneath the axis, by name.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no line has a point, or ``log`` with a number that is not above zero.
    """
    curves = {str(name): dict(sorted(curve.items())) for name, curve in series.items()}
    known = [(x, y) for curve in curves.values() for x, y in curve.items() if _finite(y)]
    if not known:
        raise InputError("there are no points to draw: pass {name: {x: y}} with numbers in it")
    xs, ys = (sorted(set(numbers)) for numbers in zip(*known, strict=True))
    if log and min(*xs, *ys) <= 0:
        raise InputError(f"a logarithmic axis has no place for {min(*xs, *ys)}: pass log=False")
    legend = []
    plain = {name: name.partition(" in ")[0] for name in curves}
    pairs = any(name != base and base in curves for name, base in plain.items())
    for number, (name, curve) in enumerate(curves.items()):
        heights = [y if _finite(y) else math.nan for y in curve.values()]
        marker = LINE_MARKERS[number % len(LINE_MARKERS)] if len(curve) <= MOST_MARKERS else ""
        style = line_style(number, COLOURS.get(name, ""))
        if pairs:
            base = plain[name] if plain[name] in curves else name
            style = line_style(list(curves).index(base), COLOURS.get(base, ""))
            style["linestyle"] = "-" if base == name else (0, (1.5, 1))  # seen beside a marker
        legend.append(Line2D([*curve], heights, label=name, marker=marker, markersize=6, **style))
    limits = []
    if limit is not None and (limit > 0 if log else limit <= 3 * max(ys)):  # or all would be flat
        limits = [limit]
        legend.append(Line2D([], [], label=f"{limit_label}: {write(limit)}", **LIMIT_LINE))
    columns = 3 if max(len(entry.get_label()) for entry in legend) > 16 else 5
    title = title or against(y_label, x_label)
    figure = Picture(title, source, body=350, legend=legend, columns=columns)
    with figure.drawing() as axes:
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for line in legend[: len(curves)]:
            axes.add_line(line)
        for y in limits:
            axes.axhline(y, **LIMIT_LINE)
        axes.autoscale_view()
        low, high = min(ys + limits), max(ys + limits)
        if log:
            axes.set_ylim(low / 1.3, high * 1.5)
        elif low >= 0:
            axes.set_ylim(0, 1.12 * high or 1)
        scale(axes.yaxis, write, log=log)
        places = np.log2(xs) if log else np.array(xs)
        if np.all(np.diff(places) >= 0.08 * np.ptp(places)):  # a tick at each x, where it has room
            axes.xaxis.set_major_locator(FixedLocator(xs))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
        axes.minorticks_off()
        name_axes(axes, "" if under else x_label, y_label)
        if under:
            rows = zip(xs, *under.values(), strict=False)
            axes.set_xticks(xs, ["\n".join(map("{:,.6g}".format, row)) for row in rows])
            names, place = "\n".join([x_label, *under]), ("axes fraction", "offset points")
            axes.annotate(names, (0, 0), (-8, -6), *place, ha="right", va="top", color=GREY)
    every = sorted({x for curve in curves.values() for x in curve})
    caption = "; ".join(filter(None, [figure.title, source])) + "."
    if len(every) > TABLE_ROWS:
        caption += f" {TABLE_ROWS} of {len(every)} points."
        every = [every[i] for i in np.linspace(0, len(every) - 1, TABLE_ROWS).round().astype(int)]
    rows = []
    for x in every:
        heights = [curve.get(x) for curve in curves.values()]
        rows.append([f"{x:,.6g}", *(write(y) if _finite(y) else MISSING for y in heights)])
    figure.describe("Lines", [x_label, *curves], rows, caption=caption, text_columns=())
    return figure.show()


def _finite(y: float | None) -> bool:
    return y is not None and math.isfinite(y)
