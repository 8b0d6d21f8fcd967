"""Bars made of parts: bytes by where they are, seconds by what they were spent on.

    parts({"in memory": {"device": 4 << 30}, "on disk": {"device": 1 << 28, "disk": 4 << 30}})

Limits: bars are to scale, so beside one a thousand times longer another is a hairline; the table
still has its numbers. Meant for up to six parts.
"""

import math
from collections.abc import Callable, Mapping

import matplotlib as mpl
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from labkit.memory import InputError, format_bytes
from labkit.show.curves import LINE_COLOURS
from labkit.show.picture import (
    EDGE,
    GREY,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    legend,
    one_line,
    place,
    short,
    text_width,
    write_title,
)
from labkit.show.rich import MISSING, grid

_ROW, _HEAD, _FOOT, _RIGHT = 42, 88, 44, 110  # pixels
_HATCHES = ("", "///", "...", "\\\\\\", "---", "xxx")
_MOST = len(_HATCHES)


def write_seconds(value: float) -> str:
    """Seconds in words: ``"1.25 s"`` or ``"80 ms"``, with three significant digits.

    Args:
        value: the seconds.
    """
    return f"{value:,.3g} s" if value >= 1 or value == 0 else f"{1e3 * value:,.3g} ms"


def parts(
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
        write: how an amount is written; `write_seconds` for seconds.
        source: where the numbers come from.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no bars, more than six parts, or an amount that is negative or no number.
    """
    names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    _check(bars, names)
    looks = {
        name: {"facecolor": colour, "hatch": hatch, "zorder": 3, **EDGE}
        for name, colour, hatch in zip(names, LINE_COLOURS, _HATCHES, strict=False)
    }
    totals = [sum(bar.values()) for bar in bars.values()]
    with mpl.rc_context(STYLE):
        figure = Picture(_HEAD + _ROW * len(bars) + _FOOT)
        write_title(figure, title, source)
        legend(figure, [Patch(**look) for look in looks.values()], names, ncols=_MOST)
        axes = figure.add_axes((0, 0, 1, 1))
        left = 0.0
        for y, (bar, amounts) in enumerate(bars.items()):
            style = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            text = axes.text(-0.012, y, one_line(bar, 34), **style)
            left = max(left, text_width(figure, text))
            start = 0.0
            for name in names:
                axes.barh(y, amounts.get(name, 0), left=start, height=0.62, **looks[name])
                start += amounts.get(name, 0)
            room = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(write(start), (start, y), annotation_clip=False, **room)
        place(figure, axes, left=min(left + 24, 0.4 * WIDTH), right=_RIGHT, top=_HEAD, bottom=_FOOT)
        axes.set_xlim(0, max(totals) or 1)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.yaxis.set_major_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.tick_params(length=0, colors=GREY)
        if write is format_bytes:
            byte_ticks(axes.xaxis, max(totals) or 1, 5)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(write(value))))
    rows = []
    for (bar, amounts), total in zip(bars.items(), totals, strict=True):
        cells = [write(amounts[name]) if name in amounts else MISSING for name in names]
        rows.append([bar, *cells, write(total)])
    caption = "; ".join(filter(None, [title, source])) + "."
    figure.table = grid(["", *names, "together"], rows, caption=caption)
    said = "; ".join(f"{row[0]} {row[-1]}" for row in rows)
    figure.alt = f"Bars. {title}: {said}. The parts are {', '.join(names)}."
    return figure.show()


def _check(bars: Mapping[str, Mapping[str, float]], names: list[str]) -> None:
    if not names:
        raise InputError("there is nothing to draw: pass {bar: {part: amount}}")
    if len(names) > _MOST:
        raise InputError(f"a bar has at most {_MOST} parts, not {', '.join(names)}")
    for bar, amounts in bars.items():
        for name, amount in amounts.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float):
                raise InputError(f"{name} of {bar!r} must be a number, not {amount!r}")
            if not 0 <= amount < math.inf:
                raise InputError(f"{name} of {bar!r} must be finite and not negative: {amount}")
