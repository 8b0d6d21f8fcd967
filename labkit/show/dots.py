"""Dots: two quantities of several things, such as the memory and the last loss of optimizers.

    dots({"AdamW": (run.peak_bytes, losses.final)}, "peak", "last loss")

Each dot has its name beside it, at the nearest place where it covers no other dot and no other
name; a thin line leads to a name that had to stand farther off.

Limits: meant for up to some twenty dots. Dots at one and the same spot hide each other; the table
has them all. Both axes are linear, and begin at zero only where that wastes less than half.
"""

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from labkit.memory import InputError, format_bytes
from labkit.show.curves import LINE_COLOURS, LINE_MARKERS
from labkit.show.picture import (
    GREY,
    INK,
    STYLE,
    Picture,
    byte_ticks,
    one_line,
    place,
    short,
    write_title,
)
from labkit.show.rich import MISSING, Rich, grid

_TICKS = 6
_HEIGHT, _FOOT = 330, 56  # pixels
_DOT = 7  # pixels from a dot's middle that no name may cover
#: Where the middle of a name may stand: (dx, dy) in halves of its size, then pixels added outwards.
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
_REACHES = (12, 19, 30, 46, 66, 90, 120)
_LEADS = 20  # pixels beyond which a line leads from the dot to its name


def write_number(value: float) -> str:
    """A number with three significant digits, as ``dots`` writes what is not bytes."""
    return f"{value:,.3g}"


def dots(
    points: Mapping[str, tuple[float | None, float | None]],
    x_label: str,
    y_label: str,
    *,
    title: str | None = None,
    source: str = "",
    write_x: Callable[[float], str] = format_bytes,
    write_y: Callable[[float], str] = write_number,
) -> Picture:
    """Show things as dots with their names, and the numbers in a table beneath.

    Args:
        points: for each name its ``(x, y)``. A number that could not be had (None, or a loss that
            is not finite) leaves the thing out of the picture, with a dash in the table.
        x_label: what x is, with its unit.
        y_label: what y is, with its unit.
        title: what the figure shows; None: "<y_label> against <x_label>".
        source: where the numbers come from, such as ``run.label``.
        write_x: turns an x into text; the default takes bytes.
        write_y: turns a y into text; the default writes three significant digits.

    Returns:
        The figure, already shown.

    Raises:
        InputError: something is not a pair, or no pair has two numbers.
    """
    pairs = {str(name): _pair(name, point) for name, point in points.items()}
    drawn = {name: pair for name, pair in pairs.items() if None not in pair}
    if not drawn:
        raise InputError("there are no dots to draw: pass {name: (x, y)} with numbers in it")
    title = title or f"{y_label[:1].upper()}{y_label[1:]} against {x_label}"
    head = 66 if source else 46
    with mpl.rc_context(STYLE):
        figure = Picture(head + _HEIGHT + _FOOT)
        write_title(figure, title, source)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=100, right=24, top=head, bottom=_FOOT)
        _scale(axes.xaxis, axes.set_xlim, [x for x, _ in drawn.values()], write_x)
        _scale(axes.yaxis, axes.set_ylim, [y for _, y in drawn.values()], write_y)
        axes.grid()
        axes.tick_params(length=0, pad=6)
        axes.set_xlabel(one_line(x_label, 90))
        axes.set_ylabel(one_line(y_label, 45))
        for number, pair in enumerate(drawn.values()):
            axes.plot(
                *pair, LINE_MARKERS[number % len(LINE_MARKERS)], markersize=9, zorder=4,
                color=LINE_COLOURS[number % len(LINE_COLOURS)], markeredgecolor=INK,
            )  # fmt: skip
        _write_names(figure, axes, drawn)
    figure.table = _table(pairs, x_label, y_label, title, source, write_x, write_y)
    figure.alt = _alt(drawn, title, source, write_x, write_y)
    return figure.show()


def _pair(name: Any, point: Any) -> tuple[float | None, float | None]:
    if isinstance(point, str) or not hasattr(point, "__len__") or len(point) != 2:
        raise InputError(f"{name!r} needs a pair (x, y), not {point!r}")
    for value in point:
        if value is not None and not isinstance(value, int | float):
            raise InputError(f"{name!r} needs numbers or None, not {value!r}")
    x, y = (v if v is not None and math.isfinite(v) else None for v in point)
    return x, y


def _scale(
    axis: Axis, set_limits: Callable[..., Any], values: list[float], write: Callable[[float], str]
) -> None:
    """Limits with room for names around the dots, and ticks at round numbers."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    low, high = low - 0.12 * span, high + 0.12 * span
    if 0 <= min(values) <= (high - low) and low < high / 2:
        low = 0.0  # no more than half of the axis is given away
    set_limits(low, high)
    for count in range(_TICKS, 0, -1):
        if write is format_bytes and low >= 0:
            byte_ticks(axis, high, count, low)
        else:
            axis.set_major_locator(MaxNLocator(count))
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        if len({_tick(tick, write) for tick in ticks}) == len(ticks):
            break  # more of them would be written alike
    else:
        axis.set_major_locator(FixedLocator(ticks[:1]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, write)))


def _tick(value: float, write: Callable[[float], str]) -> str:
    return short(write(float(f"{value:.12g}")))  # 0.3, not 0.30000000000000004


# --- names ----------------------------------------------------------------------------------------


def _write_names(figure: Picture, axes: Axes, drawn: Mapping[str, tuple[float, float]]) -> None:
    """Each name near its dot, clear of all dots and of the names before it."""
    renderer = figure.canvas.get_renderer()
    middles = [tuple(axes.transData.transform(pair)) for pair in drawn.values()]
    covered = [Bbox.from_extents(x - _DOT, y - _DOT, x + _DOT, y + _DOT) for x, y in middles]
    room = axes.get_window_extent()
    to_points = 72 / figure.dpi
    for (name, pair), (x, y) in zip(drawn.items(), middles, strict=True):
        text = axes.annotate(
            one_line(name, 40), pair, xytext=(0, 0), textcoords="offset points", size=9.5,
            ha="center", va="center", color=INK, zorder=5,
        )  # fmt: skip
        size = text.get_window_extent(renderer)
        box, dx, dy = _free_place(x, y, size.width, size.height, covered, room)
        text.set_position((dx * to_points, dy * to_points))
        covered.append(box)
        if _distance(box, x, y) > _LEADS:
            axes.annotate(
                "", pair, xytext=(dx * to_points, dy * to_points), textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "patchB": None,
                            "shrinkA": size.height, "shrinkB": 6},
                zorder=2,
            )  # fmt: skip


def _free_place(
    x: float, y: float, width: float, height: float, covered: list[Bbox], room: Bbox
) -> tuple[Bbox, float, float]:
    """The nearest box around (x, y) that covers nothing; where there is none, what covers least."""
    best, least = None, math.inf
    for reach, (right, up) in product(_REACHES, _SIDES):
        away = reach * (0.7 if right and up else 1)
        dx, dy = right * (width / 2 + away), up * (height / 2 + away)
        box = Bbox.from_bounds(x + dx - width / 2, y + dy - height / 2, width, height)
        overlap = sum(_shared(box.padded(2), other) for other in covered)
        outside = width * height - _shared(box, room)
        if overlap + outside < least - 0.5:
            best, least = (box, dx, dy), overlap + outside
        if least < 0.5:
            break
    return best


def _shared(one: Bbox, other: Bbox) -> float:
    """Square pixels that two boxes have in common."""
    common = Bbox.intersection(one, other)
    return common.width * common.height if common else 0.0


def _distance(box: Bbox, x: float, y: float) -> float:
    return math.hypot(
        max(box.x0 - x, 0, x - box.x1),
        max(box.y0 - y, 0, y - box.y1),
    )


# --- the same in words ----------------------------------------------------------------------------


def _table(
    pairs: Mapping[str, tuple[float | None, float | None]],
    x_label: str,
    y_label: str,
    title: str,
    source: str,
    write_x: Callable[[float], str],
    write_y: Callable[[float], str],
) -> Rich:
    rows = [
        [name, MISSING if x is None else write_x(x), MISSING if y is None else write_y(y)]
        for name, (x, y) in pairs.items()
    ]
    caption = "; ".join(filter(None, [title, source])) + "."
    return grid(["", x_label, y_label], rows, caption=caption)


def _alt(
    drawn: Mapping[str, tuple[float, float]],
    title: str,
    source: str,
    write_x: Callable[[float], str],
    write_y: Callable[[float], str],
) -> str:
    parts = [f"{name}: {write_x(x)}, {write_y(y)}" for name, (x, y) in drawn.items()]
    where = f", {source}" if source else ""
    return (
        f"Scatter plot. {title}{where}. {'; '.join(parts)}. The table below holds the same numbers."
    )
