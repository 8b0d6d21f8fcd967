"""Curves: one quantity against another, such as the peak against the batch size.

Limits: meant for a handful of curves; from the eighth on, colours repeat.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter

from labkit.memory import Category, InputError, format_bytes
from labkit.show.picture import (
    COLOURS,
    INK,
    STYLE,
    Picture,
    byte_ticks,
    legend,
    one_line,
    place,
    short,
    write_title,
)
from labkit.show.rich import MISSING, Rich, grid

LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PALE = ("#E69F00", "#56B4E9")
"""Lines that take a dark outline: their contrast with white paper is below 3 (WCAG 2.2, 1.4.11)."""
LINE_MARKERS = "osD^vPX*"
LINE_DASHES = ("-", "--", "-.", ":")
TABLE_ROWS = 12


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
) -> Picture:
    """Show one or more curves, with the numbers in a table beneath.

    Args:
        series: for each curve's name its points, ``{x: y}``; None for a y that could not be
            had (out of memory): a gap in the curve, a dash in the table. A curve named after
            a category has the category's colour.
        x_label: what x is, with its unit.
        y_label: what y is.
        log: both axes logarithmic, so that "twice as much" is the same distance everywhere
            and a power law is straight. Needs numbers above zero.
        title: what the figure shows; None: "<y_label> against <x_label>".
        source: where the numbers come from, such as ``run.label``.
        limit: where to draw a horizontal line.
        limit_label: what to call that line.
        write: turns a y into text; the default takes bytes.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no curve has a point, or ``log`` with a number that is not above zero.
    """
    points = {
        str(name): sorted((x, y) for x, y in curve.items() if _is_number(y))
        for name, curve in series.items()
    }
    _check_points(points, log)
    title = title or f"{y_label[:1].upper()}{y_label[1:]} against {x_label}"
    columns = 3 if max(map(len, points)) > 16 else 5
    top = 54 if source else 34
    head = top + 12 + 24 * math.ceil(len(points) / columns)
    caption = "; ".join(filter(None, [title, source])) + "."
    with mpl.rc_context(STYLE):
        figure = Picture(head + 300 + 56)
        write_title(figure, title, source)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=100, right=24, top=head, bottom=56)
        handles = _draw_curves(axes, series, points)
        _scale_lines(axes, points, log, limit, limit_label, write)
        axes.set_xlabel(one_line(x_label, 90))
        axes.set_ylabel(one_line(y_label, 45))
        legend(figure, handles, [one_line(name, 30) for name in points], ncols=columns, top=top)
    figure.table = _lines_table(series, x_label, caption, write)
    figure.alt = _lines_alt(title, source, points, write)
    return figure.show()


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _check_points(points: Mapping[str, list[tuple[float, float]]], log: bool) -> None:
    values = [value for curve in points.values() for point in curve for value in point]
    if not values:
        raise InputError("there are no points to draw: pass {name: {x: y}} with numbers in it")
    if log and min(values) <= 0:
        raise InputError(f"a logarithmic axis has no place for {min(values)}: pass log=False")


def line_look(colour: str) -> dict[str, Any]:
    """How a line in this colour looks, as keywords of matplotlib's ``plot``."""
    outline = [withStroke(linewidth=3, foreground=INK)] if colour in PALE else None
    return {"color": colour, "markeredgecolor": INK, "markeredgewidth": 0.6, "linewidth": 2,
            "path_effects": outline}  # fmt: skip


def _draw_curves(
    axes: Axes,
    series: Mapping[str, Mapping[float, float | None]],
    points: Mapping[str, list[tuple[float, float]]],
) -> list[Any]:
    handles = []
    for number, (name, curve) in enumerate(zip(points, series.values(), strict=True)):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        if name in list(Category):
            colour = COLOURS[Category(name)]
        ordered = sorted(curve.items())
        (line,) = axes.plot(
            [x for x, _ in ordered],
            [y if _is_number(y) else math.nan for _, y in ordered],
            **line_look(colour),
            marker=LINE_MARKERS[number % len(LINE_MARKERS)] if len(ordered) <= 40 else "",
            markersize=6,
            linestyle=LINE_DASHES[number % len(LINE_DASHES)],
        )
        handles.append(line)
    return handles


def _scale_lines(
    axes: Axes,
    points: Mapping[str, list[tuple[float, float]]],
    log: bool,
    limit: float | None,
    limit_label: str,
    write: Callable[[float], str],
) -> None:
    xs = sorted({x for curve in points.values() for x, _ in curve})
    ys = [y for curve in points.values() for _, y in curve]
    if log:
        axes.set_xscale("log", base=2)
        low, high = min(ys), max(ys)
        if limit is not None and limit > 0:  # how far off it is can be seen on such an axis
            low, high = min(low, limit), max(high, limit)
        # Bytes have binary units; of other numbers people read decades, if there are some.
        base = 2 if write is format_bytes or high < 100 * low else 10
        axes.set_yscale("log", base=base)
        power_of = math.log2 if base == 2 else math.log10
        low_power, high_power = math.floor(power_of(low)), math.ceil(power_of(high))
        stride = max(1, math.ceil((high_power - low_power) / 6))
        ticks = [float(base) ** power for power in range(low_power, high_power + 1, stride)]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.minorticks_off()
        axes.set_ylim(low / 1.3, high * 1.5)
    elif min(ys) >= 0:
        high = max([*ys, limit if limit and limit < 3 * max(ys) else 0])
        axes.set_ylim(0, 1.12 * high or 1)
        if write is format_bytes:
            byte_ticks(axes.yaxis, 1.12 * high, 6)
    if write is not format_bytes or log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short(write(y))))
    if len(xs) <= 10 and (log or len(xs) <= 6):
        axes.xaxis.set_major_locator(FixedLocator(xs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.grid()
    axes.tick_params(length=0, pad=6)
    if limit is not None and (limit > 0 if log else limit <= axes.get_ylim()[1]):
        axes.axhline(limit, color=INK, linewidth=1.6, linestyle=(0, (5, 2)))
        side = _free_side(axes, points, limit)
        axes.annotate(
            f"{limit_label}: {write(limit)}",
            (side, limit),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-6 if side else 6, 4),
            textcoords="offset points",
            ha="right" if side else "left",
            size=9.5,
        )


_CROWDED = 40  # pixels between a limit and the nearest curve: no room for the limit's name


def _free_side(axes: Axes, points: Mapping[str, list[tuple[float, float]]], limit: float) -> int:
    """Where to name the limit: 0, the left, or 1, the right, if a curve is in the way at the left.

    The axes must have their place and their scales.
    """
    xs = [x for curve in points.values() for x, _ in curve]

    def room(end: float) -> float:
        ys = [y for curve in points.values() for x, y in curve if x == end]
        _, at = axes.transData.transform((end, limit))
        return min(abs(axes.transData.transform((end, y))[1] - at) for y in ys)

    left, right = room(min(xs)), room(max(xs))
    return 1 if left < _CROWDED and left < right else 0


def _lines_table(
    series: Mapping[str, Mapping[float, float | None]],
    x_label: str,
    caption: str,
    write: Callable[[float], str],
) -> Rich:
    xs = sorted({x for curve in series.values() for x in curve})
    if len(xs) > TABLE_ROWS:
        caption += f" {TABLE_ROWS} of {len(xs)} points."
        xs = [xs[round(i * (len(xs) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]
    rows = [
        [f"{x:,.6g}"]
        + [write(curve[x]) if _is_number(curve.get(x)) else MISSING for curve in series.values()]
        for x in xs
    ]
    return grid([x_label, *map(str, series)], rows, caption=caption, words=())


def _lines_alt(
    title: str,
    source: str,
    points: Mapping[str, list[tuple[float, float]]],
    write: Callable[[float], str],
) -> str:
    parts = [
        f"{name}: from {write(curve[0][1])} at {curve[0][0]:,.6g} "
        f"to {write(curve[-1][1])} at {curve[-1][0]:,.6g}"
        for name, curve in points.items()
        if curve
    ]
    where = f", {source}" if source else ""
    return f"Lines. {title}{where}. {'; '.join(parts)}. The table below holds the same numbers."
